"""Files: atomic writes, masks, output folders, safetensors headers, YAML."""
