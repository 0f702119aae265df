// Memory of large results, such as a tile of logits: what the last one left serves the next.
//
// The C library would return so much memory when it is freed, and each page of a new result would be a fault; or small
// objects would settle in it, and the next result would need more.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <new>

namespace vllm_cpu {

class LargeResult {
 public:
  static constexpr int64_t kLeastBytes = 4 * 1024 * 1024;

  // float32 [rows, columns] on the CPU, uninitialised, of at least kLeastBytes.
  static torch::stable::Tensor make(int64_t rows, int64_t columns) {
    const int64_t bytes = rows * columns * int64_t{sizeof(float)};
    LargeResult* kept = spare().exchange(nullptr);
    // A much larger one had better go than be held by a small result.
    if (kept != nullptr && (kept->bytes_ < bytes || kept->bytes_ > 4 * bytes)) {
      delete kept;
      kept = nullptr;
    }
    LargeResult* own = kept != nullptr ? kept : new LargeResult(bytes);
    const auto give_back = [own](void*) { delete spare().exchange(own); };
    return torch::stable::from_blob(own->memory_, {rows, columns}, {columns, 1},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    torch::headeronly::ScalarType::Float, give_back);
  }

 private:
  explicit LargeResult(int64_t bytes) : bytes_(bytes), memory_(::operator new(bytes, kAlignment)) {}
  ~LargeResult() { ::operator delete(memory_, kAlignment); }

  // Results may end on any thread. The one that is kept last is not freed.
  static std::atomic<LargeResult*>& spare() {
    static std::atomic<LargeResult*> kept{nullptr};
    return kept;
  }

  static constexpr std::align_val_t kAlignment{64};
  int64_t bytes_;
  void* memory_;
};

}  // namespace vllm_cpu
