"""Choose the N:M pattern of every decoder block; together they keep as many weights as one pattern for all."""
