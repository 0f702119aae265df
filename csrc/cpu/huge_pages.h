// Memory of packed weights, in huge pages where the system grants them: a product with one row reads each weight once, and
// with pages of 4 KiB looking up their addresses took up to 40 % of its time.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

namespace vllm_cpu {

class WeightMemory {
 public:
  // [count] on the CPU, uninitialised, from a cache line on. Small ones share what is asked of the system, which has it back
  // when the last of them is gone.
  static torch::stable::Tensor make(int64_t count, torch::headeronly::ScalarType dtype, int64_t element_size) {
    const int64_t bytes = count * element_size;
    std::shared_ptr<char> own = bytes < kShared / 2 ? share(bytes) : allocate(bytes);
    char* start = own.get();
    return torch::stable::from_blob(start, {count}, {1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    dtype, [own = std::move(own)](void*) {});
  }

 private:
  static constexpr int64_t kPage = 2 * 1024 * 1024, kShared = 16 * kPage, kLine = 64;

  static std::shared_ptr<char> allocate(int64_t bytes) {
    constexpr std::align_val_t kAlignment{kPage};
    const int64_t size = (bytes + kPage - 1) / kPage * kPage;
    char* start = static_cast<char*>(::operator new(size, kAlignment));
#if defined(MADV_HUGEPAGE)
    // A system without huge pages refuses, and nothing changes.
    madvise(start, size, MADV_HUGEPAGE);
#endif
    return {start, [](char* memory) { ::operator delete(memory, kAlignment); }};
  }

  static std::shared_ptr<char> share(int64_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<char> last;
    static int64_t used;
    const std::lock_guard lock(mutex);
    std::shared_ptr<char> memory = last.lock();
    if (memory == nullptr || used + bytes > kShared) {
      memory = allocate(kShared);
      last = memory;
      used = 0;
    }
    char* start = memory.get() + used;
    used += (bytes + kLine - 1) / kLine * kLine;
    return {std::move(memory), start};
  }
};

}  // namespace vllm_cpu
