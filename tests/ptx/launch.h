// What cudart.cpp, gpu.py and machine.cpp tell each other of a launch: Launch in gpu.py.
#pragma once

#include <cstdint>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct Launch {
  u32 grid[3], block[3], cluster[3], shared;  // shared: bytes, dynamic ones until gpu.py adds the others
  u32 parameter_bytes, tensors, seed;
  const u8* parameters;
  const u64* bounds;           // of the tensors, first and end
  void (*step)(struct Lane&);  // runs a thread until it waits
  u64 lane_bytes;              // of a Lane with the registers of this kernel
};
