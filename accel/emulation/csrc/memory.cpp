#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

namespace accelrl::musa {

namespace {

struct Counters {
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> frees{0};
  std::atomic<int64_t> failures{0};
  std::atomic<int64_t> outside{0};
};

std::array<Counters, kMaxDevices> counters;

void take_budget(DeviceIndex device, size_t bytes) {
  mark_used();
  auto& counter = counters[device];
  const int64_t after = counter.allocated += int64_t(bytes);
  const int64_t capacity = settings().bytes_per_device - counter.outside;
  if (C10_UNLIKELY(after > capacity)) {
    counter.allocated -= int64_t(bytes);
    counter.failures++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        "MUSA out of memory. Tried to allocate ", bytes, " bytes. GPU ", int(device), " has a total capacity of ",
        capacity, " bytes of which ", capacity - (after - int64_t(bytes)), " bytes are free (emulated device).");
  }
  counter.allocations++;
  int64_t peak = counter.peak.load(std::memory_order_relaxed);
  while (after > peak && !counter.peak.compare_exchange_weak(peak, after)) {
  }
}

void give_back(DeviceIndex device, size_t bytes) {
  counters[device].allocated -= int64_t(bytes);
  counters[device].frees++;
}

// What the context of a device pointer points to: memory of its own, or a host storage that a kernel made.
struct Block {
  at::DataPtr own;
  c10::Storage adopted;
  size_t bytes;
  DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  give_back(block->device, block->bytes);
  delete block;
}

at::DataPtr no_memory(DeviceIndex device) {
  return {nullptr, nullptr, &c10::detail::deleteNothing, Device(kMusa, device)};
}

class Allocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) {
      return no_memory(device);
    }
    take_budget(device, bytes);
    auto own = c10::GetCPUAllocator()->allocate(bytes);
    void* data = own.get();
    return {data, new Block{std::move(own), {}, bytes, device}, &free_block, Device(kMusa, device)};
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {}

  void recordStream(const at::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const auto counts = memory_counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      bytes->current = counts.allocated;
      bytes->peak = counts.peak;
    }
    stats.allocation[0].current = counts.allocations - counts.frees;
    stats.num_ooms = counts.failures;
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex) override {}

  void resetPeakStats(DeviceIndex device) override {
    reset_peak(device);
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto capacity = settings().bytes_per_device;
    const auto counts = memory_counts(device);
    return {size_t(capacity - counts.allocated - counts.outside), size_t(capacity)};
  }
};

// is_pinned() must tell pinned memory from the rest, and views into it begin anywhere: hence an ordered map of starts.
class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    const size_t size = bytes ? bytes : 1;
    void* data = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[static_cast<const char*>(data)] = size;
    return {data, data, &release, Device(c10::DeviceType::CPU)};
  }

  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(static_cast<const char*>(data));
    }
    c10::free_cpu(data);
  }

  static bool holds(const void* pointer) {
    const auto* at = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(at);
    if (next == blocks().begin()) {
      return false;
    }
    --next;
    return at < next->first + next->second;
  }

  at::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  // A pending copy holds its source itself (streams.h), so memory need not wait here for an event.
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}

  void reset_peak_stats() override {}

 private:
  // Never destroyed: tensors of other modules are freed after our statics would be.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::map<const char*, size_t>& blocks() {
    static auto* blocks = new std::map<const char*, size_t>;
    return *blocks;
  }
};

}  // namespace

MemoryCounts memory_counts(DeviceIndex device) {
  const auto& counter = counters.at(device);
  return {counter.allocated, counter.peak, counter.allocations, counter.frees, counter.failures, counter.outside};
}

void take_outside(DeviceIndex device, int64_t bytes) {
  counters.at(device).outside += bytes;
}

void reset_peak(DeviceIndex device) {
  auto& counter = counters.at(device);
  counter.peak = counter.allocated.load();
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new Allocator;
  return allocator;
}

at::HostAllocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* pointer) {
  return PinnedAllocator::holds(pointer);
}

at::DataPtr adopt_host_storage(c10::Storage host, DeviceIndex device) {
  const size_t bytes = host.nbytes();
  void* data = host.mutable_data();
  if (data == nullptr) {
    return no_memory(device);
  }
  take_budget(device, bytes);
  return {data, new Block{{}, std::move(host), bytes, device}, &free_block, Device(kMusa, device)};
}

c10::Storage device_storage_over(c10::Storage host, DeviceIndex device) {
  const size_t bytes = host.nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, adopt_host_storage(std::move(host), device), device_allocator(),
      /*resizable=*/true));
}

}  // namespace accelrl::musa
