// Runs the threads of a kernel in random order, each until it waits for others.
#include <numeric>
#include <random>

#include "ptx.h"

namespace {

using Random = std::mt19937;

bool is_ready(const Lane* lane) { return lane->state == kReady; }
bool any_ready(const Warp& warp) { return std::any_of(warp.lanes.begin(), warp.lanes.end(), is_ready); }

// Lanes that wait for the same warp instruction go on when all that its mask names are there.
void complete(Warp& warp) {
  u32 waiting = 0;
  for (const Lane* lane : warp.lanes) waiting |= (lane->state == kAtWarp) << lane->lane;
  const auto all_there = [&](const Lane* lane) { return lane->state == kAtWarp && !(lane->mask & ~waiting); };
  const auto found = std::find_if(warp.lanes.begin(), warp.lanes.end(), all_there);
  if (found == warp.lanes.end()) return;
  const Lane first = **found;
  for (Lane* lane : warp.lanes) {
    if (!(first.mask >> lane->lane & 1)) continue;
    if (lane->key != first.key || lane->mask != first.mask) {
      fail(first, "another lane is at line " + std::to_string(lane->line));
    }
    std::copy_n(lane->words, std::size(lane->words), warp.words[lane->lane]);
    if (lane->row) std::memcpy(warp.words[lane->lane], at(*lane, kShared, lane->words[0], 16), 16);
    lane->state = kReady;
  }
}

void open_barriers(Cluster& cluster, const std::vector<Warp>& warps) {
  if (cluster.arrived && cluster.arrived == cluster.running) ++cluster.phase, cluster.arrived = 0;
  const auto full = [](const Block::Barrier& at) { return at.arrived == at.expected; };
  for (const Warp& warp : warps) {
    for (Lane* lane : warp.lanes) {
      if (lane->state == kAtBarrier && full(lane->block->barriers[lane->barrier])) lane->state = kReady;
      if (lane->state == kAtCluster && cluster.phase == lane->phase) lane->state = kReady;
    }
  }
  for (Block& block : cluster.blocks) {
    for (Block::Barrier& at : block.barriers) at.arrived = full(at) ? 0 : at.arrived;
  }
}

// All threads of a warp that can, one after the other.
void run_warp(Cluster& cluster, Warp& warp, Random& random) {
  std::shuffle(warp.lanes.begin(), warp.lanes.end(), random);
  for (Lane* lane : warp.lanes) {
    if (!is_ready(lane)) continue;
    cluster.launch->step(*lane);
    if (lane->state != kEnded) continue;
    --lane->block->running, --cluster.running;
    cluster.arrived -= lane->phase == cluster.phase + 1;  // its end counts as well
  }
  complete(warp);
}

void run_cluster(Cluster& cluster, std::vector<Warp>& warps, Random& random) {
  const u32 patience = std::vector<u32>{1, 4, 1000}[random() % 3];  // how long one warp runs while others wait
  const auto next = [&]() -> Warp* {
    const size_t first = random() % warps.size();
    for (size_t i = 0; i < warps.size(); ++i) {
      if (Warp& warp = warps[(first + i) % warps.size()]; any_ready(warp)) return &warp;
    }
    return nullptr;
  };
  while (cluster.running) {
    Warp* warp = next();
    if (!warp || random() % 4 == 0) open_barriers(cluster, warps);
    if (!warp) warp = next();
    if (!warp) {
      for (const Warp& other : warps) {
        for (const Lane* lane : other.lanes) {
          if (lane->state != kEnded) fail(*lane, "nothing can go on; of all threads of the cluster this one waits");
        }
      }
    }
    for (u32 turn = 0; turn < patience && any_ready(*warp); ++turn) run_warp(cluster, *warp, random);
  }
}

struct Index {
  u32 x, y, z;
  Index(u32 number, const u32 (&shape)[3])
      : x(number % shape[0]), y(number / shape[0] % shape[1]), z(number / shape[0] / shape[1]) {}
};

void run(const Launch& call) {
  Random random(call.seed);
  const u32 *shape = call.cluster, threads = call.block[0] * call.block[1] * call.block[2];
  const u32 blocks = shape[0] * shape[1] * shape[2], warps_of_block = (threads + 31) / 32;
  const u32 clusters[3] = {call.grid[0] / shape[0], call.grid[1] / shape[1], call.grid[2] / shape[2]};
  std::vector<u64> memory(blocks * threads * call.lane_bytes / 8);
  std::vector<u32> order(clusters[0] * clusters[1] * clusters[2]);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const u32 number : order) {
    const Index first(number, clusters);
    std::fill(memory.begin(), memory.end(), ~u64{0});
    Cluster cluster{&call, std::vector<Block>(blocks), 0, 0, blocks * threads};
    std::vector<Warp> warps(blocks * warps_of_block);
    std::vector<Copies> copies(blocks * threads);
    for (u32 rank = 0; rank < blocks; ++rank) {
      const Index in(rank, call.cluster);
      Block& block = cluster.blocks[rank];
      block = {
          &cluster, {first.x * shape[0] + in.x, first.y * shape[1] + in.y, first.z * shape[2] + in.z}, rank, threads};
      block.shared.assign(call.shared, 0xff);
      for (u32 i = 0; i < threads; ++i) {
        const u32 place = rank * threads + i;
        const Index tid(i, call.block);
        Warp& warp = warps[rank * warps_of_block + i / 32];
        warp.lanes.push_back(new (reinterpret_cast<u8*>(memory.data()) + place * call.lane_bytes) Lane{
            &block, &warp, &copies[place], {tid.x, tid.y, tid.z}, i % 32, (rank + 1) * kWindow});
      }
    }
    run_cluster(cluster, warps, random);
  }
}

}  // namespace

// 0, or 1 and what is wrong.
extern "C" int launch(const Launch& call, char* message, size_t size) {
  try {
    run(call);
    return 0;
  } catch (const std::exception& error) {
    snprintf(message, size, "%s", error.what());
    return 1;
  }
}
