// A thread of the emulated GPU, its memory, and the instructions of PTX that are more than an expression (translate.py
// has the others). Written after NVIDIA's PTX ISA. Where it allows an error (.approx, div.full, the sums of mma), the
// result here is the exact one, rounded once.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "launch.h"

#define INLINE [[gnu::always_inline]] inline  // g++ -Og inlines nothing else, but takes half the time of -O1

using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f16 = _Float16;
using f32 = float;
using f64 = double;
struct bf16 {
  u16 bits;
  operator f64() const { return std::bit_cast<f32>(u32{bits} << 16); }
};

// ------------------------------------------------------------------------- threads

enum State { kReady, kAtWarp, kAtBarrier, kAtCluster, kEnded };
enum Space { kGlobal, kShared, kCluster, kParameter, kGeneric };

struct Cluster;
struct Block {
  Cluster* cluster;
  u32 index[3], rank, running;  // threads that have not ended
  std::vector<u8> shared;
  struct Barrier {
    u32 arrived, expected;
  } barriers[16];
};
struct Cluster {
  const Launch* launch;
  std::vector<Block> blocks;
  u32 phase, arrived, running;
};
struct Warp {
  std::vector<struct Lane*> lanes;
  u32 words[32][9];  // what each lane brought to the latest warp instruction
};
struct Copy {
  u8* target;
  const u8* source;
  u32 bytes, exist, group;  // bytes after the first `exist` become zeros
};
using Copies = std::vector<Copy>;
struct Lane {
  Block* block;
  Warp* warp;
  Copies* copies;
  u32 tid[3], lane, base;       // base: address of the shared memory
  u32 pc = 0, line = 0;         // where it goes on; the line of the PTX in which it is
  State state = kReady;         // of the following, what belongs to it
  s64 key = 0;                  // which warp instruction; for .aligned ones, at which place
  u32 mask = 0, words[9] = {};  // lanes that take part, operands
  bool row = false;             // words[0] is the address of 16 bytes, which replace the words
  u32 barrier = 0, phase = 0;   // of the block, of the cluster
  u32 group = 0, jumps = 0;     // of asynchronous copies that is not committed; backward
};

[[noreturn]] inline void fail(const Lane& t, const std::string& what) {
  const auto& b = t.block->index;
  const u32 numbers[] = {t.tid[0], t.tid[1], t.tid[2], b[0], b[1], b[2]};
  std::string place;
  for (u32 i : numbers) place += " " + std::to_string(i);
  throw std::runtime_error(std::to_string(t.line) + ":" + what + " (thread and block" + place + ")");
}

// ------------------------------------------------------------------------- memory

// Shared memory of block r of the cluster has the addresses from (r + 1) << 24 on; global addresses are real.
constexpr u32 kWindow = 1 << 24;

inline u8* at(const Lane& t, Space space, u64 address, u64 bytes) {
  const auto refuse = [&](const char* why) {
    char text[100];
    snprintf(text, sizeof text, "%d bytes at 0x%llx: %s", int(bytes), static_cast<unsigned long long>(address), why);
    fail(t, text);
  };
  Cluster& cluster = *t.block->cluster;
  const Launch& launch = *cluster.launch;
  if (address % bytes) refuse("not aligned");
  if (space == kParameter) {
    if (address + bytes > launch.parameter_bytes) refuse("beyond the parameters");
    return const_cast<u8*>(launch.parameters) + address;
  }
  if (space == kShared || space == kCluster || (space == kGeneric && address < 17ull * kWindow)) {
    const u64 rank = address / kWindow - 1, offset = address % kWindow;
    if (rank >= cluster.blocks.size() || (space == kShared && rank != t.block->rank)) refuse("not shared memory");
    Block& block = cluster.blocks[rank];
    if (!block.running) refuse("shared memory of a thread block that has ended");
    if (offset + bytes > block.shared.size()) refuse("beyond the shared memory");
    return block.shared.data() + offset;
  }
  for (u32 i = 0; i < launch.tensors; ++i) {
    if (launch.bounds[2 * i] <= address && address + bytes <= launch.bounds[2 * i + 1]) return (u8*)address;
  }
  refuse("beyond the tensors");
  return nullptr;
}

template <class T>
INLINE T load(const u8* memory, int i) {
  T value;
  std::memcpy(&value, memory + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
INLINE void store(u8* memory, int i, T value) {
  std::memcpy(memory + i * sizeof(T), &value, sizeof(T));
}

// A copy takes place where the thread waits for it; until then its target is not a number.
inline void cp_async(Lane& t, u64 target, u64 source, u32 bytes, u32 exist) {
  if (exist > bytes) fail(t, "src-size exceeds cp-size");
  u8* const to = at(t, kShared, target, bytes);
  t.copies->push_back({to, exist ? at(t, kGlobal, source, bytes) : nullptr, bytes, exist, t.group});
  std::memset(to, 0xff, bytes);
}
inline void finish_copies(Lane& t, u32 pending_groups) {
  std::erase_if(*t.copies, [&](const Copy& copy) {
    if (copy.group + pending_groups >= t.group) return false;
    std::memset(copy.target, 0, copy.bytes);
    if (copy.exist) std::memcpy(copy.target, copy.source, copy.exist);
    return true;
  });
}

// ------------------------------------------------------------------------- registers and rounding

template <class T>
constexpr bool kIsInteger = std::is_integral_v<T>;
template <class T>
constexpr u32 kBits = 8 * sizeof(T);
template <u32 bits>
using Unsigned =
    std::conditional_t<bits == 8, u8, std::conditional_t<bits == 16, u16, std::conditional_t<bits == 32, u32, u64>>>;

// The low bits of a register.
template <class T, class Register>
INLINE T as(Register value) {
  if constexpr (std::is_same_v<T, bool>)
    return value;
  else
    return std::bit_cast<T>(static_cast<Unsigned<kBits<T>>>(value));
}
template <class Register, class T>
INLINE void set(Register& target, T value) {
  if constexpr (kIsInteger<T>)
    target = static_cast<Register>(value);
  else
    target = std::bit_cast<Unsigned<kBits<T>>>(value);
}

// x to the nearest T; NaN as arithmetic returns it. x may have been rounded to odd: then this is as good as once.
template <class T, class From>
INLINE T rounded(From x) {
  if constexpr (kIsInteger<From> || std::is_same_v<T, f64>)
    return static_cast<T>(x);
  else if constexpr (std::is_same_v<T, f32>)
    return x != x ? std::bit_cast<f32>(0x7fffffffu) : static_cast<f32>(x);
  else if constexpr (std::is_same_v<T, f16>)
    return x != x ? std::bit_cast<f16>(u16{0x7fff}) : static_cast<f16>(x);
  else {
    const f32 near = static_cast<f32>(x);
    u32 bits = std::bit_cast<u32>(near);
    if (x != x) return {0x7fff};
    if (f64{near} != x) bits = (bits - (std::fabs(f64{near}) > std::fabs(x))) | 1;
    return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
}
inline f32 flushed(f32 x) { return std::fabs(x) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, x) : x; }

inline f32 rounded_up(f64 x) {
  const f32 near = rounded<f32>(x);
  return near < x ? std::nextafter(near, std::numeric_limits<f32>::infinity()) : near;
}

// a b + c for halves, whose product is exact; rounded to odd: exact, or the neighbour whose last bit is 1.
inline f64 fma_to_odd(f64 a, f64 b, f64 c) {
  const f64 product = a * b, sum = product + c, of_c = sum - product;
  const f64 error = (product - (sum - of_c)) + (c - of_c);
  const u64 bits = std::bit_cast<u64>(sum);
  if (!std::isfinite(sum) || error == 0 || bits % 2) return sum;
  return std::bit_cast<f64>(bits + ((error > 0) == (sum > 0) ? 1 : -1));
}
u32 pair(auto low, auto high) { return u32{std::bit_cast<u16>(high)} << 16 | std::bit_cast<u16>(low); }

// ------------------------------------------------------------------------- arithmetic

template <class T>
T minimum(T a, T b) {
  if (a != a) return b;
  if constexpr (!kIsInteger<T>) return b != b || a < b || (a == b && std::signbit(a)) ? a : b;
  return a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  return kIsInteger<T> ? std::max(a, b) : -minimum(-a, -b);
}
template <class T>
T quotient(T a, T b) {  // of integers
  const bool minus_one = std::is_signed_v<T> && b == static_cast<T>(-1);
  return static_cast<T>(b == 0 ? -1 : minus_one ? 0 - a : a / b);
}
INLINE auto inverted(auto a) {
  if constexpr (std::is_same_v<decltype(a), bool>)
    return !a;
  else
    return ~a;
}
template <class T>
INLINE T shifted_left(T a, u32 b) {
  return b < kBits<T> ? static_cast<T>(a << b) : T{0};
}
INLINE auto shifted_right(auto a, u32 b) { return b < kBits<decltype(a)> ? a >> b : a < 0 ? -1 : 0; }
template <class T>
T bit_field(T a, u32 first, u32 count) {  // what lies above has the sign, or is 0
  const u32 bits = static_cast<u32>(a), last = std::min(first + count - 1, 31u);
  const u32 sign = std::is_signed_v<T> && count ? bits >> last & 1 : 0;
  u32 result = 0;
  for (u32 i = 0; i < 32; ++i) result |= (i < count && first + i < 32 ? bits >> (first + i) & 1 : sign) << i;
  return static_cast<T>(result);
}
template <class T>
T insert_bits(T a, T b, u32 first, u32 count) {
  const T mask = shifted_left(static_cast<T>(shifted_left(T{1}, count) - 1), first);  // of 0 to 64 ones
  return (b & ~mask) | (shifted_left(a, first) & mask);
}
inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline u32 prmt(u32 a, u32 b, u32 selector) {
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 choice = selector >> 4 * i, byte = (u64{b} << 32 | a) >> 8 * (choice & 7) & 0xff;
    result |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return result;
}
template <class T>
T to_integer(f64 a) {  // NaN becomes 0, what is too large the nearest
  using Limits = std::numeric_limits<T>;
  if (a != a) return 0;
  return a <= f64(Limits::min()) ? Limits::min() : a >= f64(Limits::max()) ? Limits::max() : static_cast<T>(a);
}

// ------------------------------------------------------------------------- what threads wait for

inline void wait_for_warp(Lane& t, s64 key, u32 mask, std::initializer_list<u32> words, bool row = false) {
  if (!(mask >> t.lane & 1)) fail(t, "a lane that the mask does not name");
  t.state = kAtWarp, t.key = key, t.mask = mask, t.row = row;
  std::copy(words.begin(), words.end(), t.words);
}
inline void wait_for_block(Lane& t, u32 barrier, u32 expected) {
  const auto& size = t.block->cluster->launch->block;
  Block::Barrier& at = t.block->barriers[barrier % 16];
  expected = expected ? expected : size[0] * size[1] * size[2];
  if (barrier >= 16 || expected % 32 || (at.arrived && at.expected != expected)) fail(t, "no such barrier");
  t.state = kAtBarrier, t.barrier = barrier;
  ++at.arrived, at.expected = expected;
}
inline void arrive_at_cluster(Lane& t) { ++t.block->cluster->arrived, t.phase = t.block->cluster->phase + 1; }
inline void count_jump(Lane& t) {
  if (++t.jumps > 10'000'000) fail(t, "an endless loop");
}

inline u32 from_lane(const Lane& t, u32 lane) {
  if (!(t.mask >> lane & 1)) fail(t, "reads a lane that the mask does not name");
  return t.warp->words[lane][0];
}
// Reads lane `from`, or itself. c: the last lane, and in bits 8 to 12 the bits of a lane that stay its own.
inline u32 shuffled(const Lane& t, u32 from, u32 c, bool& exists) {
  const u32 own = c >> 8 & 31;
  exists = from <= ((t.lane & own) | (c & 31 & ~own));
  return from_lane(t, exists ? from : t.lane);
}
template <class T, class Operation>
T over_lanes(const Lane& t, T result, Operation operation) {
  for (u32 i = 0; i < 32; ++i) {
    if (t.mask >> i & 1) result = operation(result, static_cast<T>(t.warp->words[i][0]), i);
  }
  return result;
}

// Element i of the four that a lane has of D [16, 8] = A [16, K] B [K, 8] + C; A is 2:4, K is 32 for 16 bits, 64 for 8.
// A row of A is stored as K / 2 elements; those of four lanes are consecutive, kIn in each register. With g = lane / 4:
//   A: registers 0 and 2 have row g, 1 and 3 row g + 8; 2 and 3 the second half of the row
//   B: register t has rows 4 kIn t + kIn (lane % 4) and following, of column g
//   D: columns 2 (lane % 4) and the next, first of row g, then of row g + 8
//   metadata, 4 bits for each 4 columns of a row: the places of its two elements. 16 bits: of the lanes 2 selector and
//     the next of every four, one for each 16 columns, bits 0 to 15 for row g, 16 to 31 for row g + 8. 8 bits: lanes 0
//     and 1 have rows g and g + 8 of columns 0 to 31, lanes 2 and 3 of columns 32 to 63.
template <class T, class Sum>
Sum mma_sp(const Lane& t, int i, Sum c, u32 selector) {
  constexpr u32 kIn = 4 / sizeof(T), kQuad = 4 * kIn;
  if (selector > (sizeof(T) == 2)) fail(t, "no such sparsity selector");
  const auto& words = t.warp->words;
  const u32 group = t.lane & ~3u, half = i / 2, column = t.lane % 4 * 2 + i % 2;
  const auto element = [](u32 word, u32 place) { return as<T>(word >> place % kIn * kBits<T>); };
  using Exact = std::conditional_t<kIsInteger<T>, s64, f64>;
  Exact sum = c;
  bool defined = true;  // unless metadata do not ascend: the rows of a tile beyond the matrix may have any
  for (u32 block = 0; block < kQuad; ++block) {
    const u32 from = sizeof(T) == 2 ? 2 * selector + block / 4 : block / 8 * 2 + half;
    const u32 shift = sizeof(T) == 2 ? 16 * half + block % 4 * 4 : block % 8 * 4;
    const u32 places = words[group + from][8] >> shift;
    defined &= (places & 3) < (places >> 2 & 3);
    for (u32 j = 0; j < 2; ++j) {
      const u32 stored = 2 * block + j, k = 4 * block + (places >> 2 * j & 3);
      const T a = element(words[group + stored % kQuad / kIn][half + stored / kQuad * 2], stored);
      const T b = element(words[4 * column + k % kQuad / kIn][4 + k / kQuad], k);
      sum += static_cast<Exact>(a) * static_cast<Exact>(b);
    }
  }
  using Limits = std::numeric_limits<Sum>;
  if constexpr (!kIsInteger<T>)
    return rounded<Sum>(defined ? sum : std::numeric_limits<f64>::quiet_NaN());
  else
    return defined ? std::clamp<s64>(sum, Limits::min(), Limits::max()) : Limits::min();  // .satfinite
}
