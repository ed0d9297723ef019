// Device memory: ordinary host memory under another name, counted per device.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace standin {

struct Counter {
  std::atomic<int64_t> now{0}, peak{0}, total{0}, blocks{0};  // bytes, bytes, bytes, allocations
};
inline Counter counters[kMaxDevices];

struct Block {  // what the data pointer of an npu storage owns
  c10::Storage host;
  size_t nbytes;
  int device;
};

inline void free_block(void* pointer) {
  auto* block = static_cast<Block*>(pointer);
  counters[block->device].now -= block->nbytes;
  counters[block->device].blocks--;
  delete block;
}

// Turns a host storage into device memory without copying it.
inline c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  const size_t nbytes = host.nbytes();
  auto& counter = counters[device.index()];
  int64_t now = (counter.now += nbytes), peak = counter.peak.load();
  while (now > peak && !counter.peak.compare_exchange_weak(peak, now)) {
  }
  counter.total += nbytes;
  counter.blocks++;
  void* data = host.mutable_data();
  return {data, new Block{std::move(host), nbytes, device.index()}, &free_block, device};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* host = c10::GetCPUAllocator();
    c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, host->allocate(nbytes), host, true);
    return adopt(std::move(storage), checked({kNPU, current}));
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached, so reserved is allocated
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& counter = counters[d];
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                        &stats.requested_bytes}) {
      auto& all = (*bytes)[0];
      all.current = counter.now;
      all.peak = counter.peak;
      all.allocated = counter.total;
      all.freed = counter.total - counter.now;
    }
    stats.allocation[0].current = counter.blocks;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override { counters[d].total = counters[d].now.load(); }
  void resetPeakStats(c10::DeviceIndex d) override { counters[d].peak = counters[d].now.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    const size_t all = 64ull << 30;  // as a 910B has
    return {all - counters[d].now, all};
  }
};
inline Allocator allocator;

// Pinned memory is host memory whose addresses are remembered.
struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex lock;
  static inline std::map<const char*, size_t> blocks;  // start -> bytes

  static void free(void* host) {
    auto* data = static_cast<c10::DataPtr*>(host);
    {
      std::lock_guard<std::mutex> guard(lock);
      blocks.erase(static_cast<const char*>(data->get()));
    }
    delete data;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    auto* host = new c10::DataPtr(c10::GetCPUAllocator()->allocate(nbytes));
    std::lock_guard<std::mutex> guard(lock);
    blocks[static_cast<const char*>(host->get())] = nbytes;
    return {host->get(), host, &free, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  static bool holds(const void* address) {
    auto* p = static_cast<const char*>(address);
    std::lock_guard<std::mutex> guard(lock);
    auto after = blocks.upper_bound(p);
    if (after == blocks.begin()) return false;
    auto& [start, nbytes] = *std::prev(after);
    return p < start + nbytes;
  }
};
inline PinnedAllocator pinned;

// The same bytes under the name "cpu". It keeps the npu storage alive.
inline c10::Storage host_view(const c10::Storage& npu) {
  auto* keep = new c10::Storage(npu);
  auto drop = [](void* p) { delete static_cast<c10::Storage*>(p); };
  c10::DataPtr data(npu.mutable_data(), keep, drop, c10::kCPU);
  return {c10::Storage::use_byte_size_t(), npu.nbytes(), std::move(data), c10::GetCPUAllocator(), true};
}

}  // namespace standin
