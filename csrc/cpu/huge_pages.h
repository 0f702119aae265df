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
  static constexpr int64_t kPage = 2 * 1024 * 1024;

  // [count] on the CPU, uninitialised, from a cache line on. Small ones share what is asked of the system, which has it back
  // when the last of them is gone; all lie in what the calling thread has reserved, as long as there is room.
  static torch::stable::Tensor make(int64_t count, torch::headeronly::ScalarType dtype, int64_t element_size) {
    std::shared_ptr<char> own = take(count * element_size);
    char* start = own.get();
    return torch::stable::from_blob(start, {count}, {1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    dtype, [own = std::move(own)](void*) {});
  }

  // A block holds several weights, one after another.
  struct Block {
    char* const start;
    const int64_t size;
    int64_t used = 0;

    // With a size of whole pages.
    explicit Block(int64_t bytes) : start(allocate(bytes)), size(bytes) {}
    ~Block() { ::operator delete(start, kAlignment); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
  };

  // Memory for the weights that the calling thread makes from now on, until the end; none where the system has not that
  // much.
  static std::shared_ptr<Block> begin_reserve(int64_t bytes) {
    try {
      reserved() = std::make_shared<Block>(whole_pages(bytes));
    } catch (const std::bad_alloc&) {
      reserved().reset();
    }
    return reserved();
  }

  // Gives the system back the pages that nothing was made of.
  static void end_reserve() {
    if (reserved() != nullptr) release(reserved()->start + reserved()->used, reserved()->size - reserved()->used);
    reserved().reset();
  }

  // Have the system provide pages before they are needed, by a write that changes nothing: while madvise provides them, no
  // other thread can ask for memory.
  static void provide(char* start, int64_t bytes) {
    constexpr int64_t kSmallPage = 4096;
    for (int64_t at = 0; at < bytes; at += kSmallPage) {
      char zero = 0;
      __atomic_compare_exchange_n(start + at, &zero, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
  }

 private:
  static constexpr int64_t kShared = 16 * kPage, kLarge = kShared / 2, kLine = 64;
  static constexpr std::align_val_t kAlignment{kPage};

  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }

  // The block that small weights are put into; guarded by `mutex`, as its `used` is.
  static std::weak_ptr<Block>& shared() {
    static std::weak_ptr<Block> only;
    return only;
  }

  static std::shared_ptr<Block>& reserved() {
    thread_local std::shared_ptr<Block> own;
    return own;
  }

  static int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  static char* allocate(int64_t bytes) {
    char* start = static_cast<char*>(::operator new(bytes, kAlignment));
#if defined(MADV_HUGEPAGE)
    // A system without huge pages refuses, and nothing changes.
    madvise(start, bytes, MADV_HUGEPAGE);
#endif
    return start;
  }

  // Whole pages of memory whose contents are not needed any more.
  static void release(char* start, int64_t bytes) {
#if defined(MADV_DONTNEED)
    const intptr_t first = whole_pages(reinterpret_cast<intptr_t>(start));
    const intptr_t last = (reinterpret_cast<intptr_t>(start) + bytes) / kPage * kPage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
  }

  static std::shared_ptr<char> take(int64_t bytes) {
    if (reserved() != nullptr && reserved()->used + bytes <= reserved()->size) return take_from(reserved(), bytes);
    if (bytes >= kLarge) return take_from(std::make_shared<Block>(whole_pages(bytes)), bytes);
    const std::lock_guard lock(mutex());
    std::shared_ptr<Block> block = shared().lock();
    if (block == nullptr || block->used + bytes > block->size) {
      block = std::make_shared<Block>(kShared);
      shared() = block;
    }
    return take_from(std::move(block), bytes);
  }

  static std::shared_ptr<char> take_from(std::shared_ptr<Block> block, int64_t bytes) {
    char* start = block->start + block->used;
    block->used += (bytes + kLine - 1) / kLine * kLine;
    if (bytes < kLarge) return {std::move(block), start};
    return {start, [block = std::move(block), bytes](char* large) { release(large, bytes); }};
  }
};

}  // namespace vllm_cpu
