// Kernel calls written down as they are made, to be made again without PyTorch in between: a step makes hundreds of
// them, and for a few rows PyTorch's operators take about as long as the kernels. Or calls that are only written down, to be
// made together: after a kernel with many rows nothing of Python and PyTorch is left in the caches, and the next operator
// takes several times as long to reach, while the other threads sleep.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

namespace vllm_cpu {

// Memory of the tensors that are made while recording. What one of them leaves the next one takes, as their calls will
// in every replay. When a recording ends, all of it is free for the next one: recordings that share memory must not
// expect their results to outlive another's replay.
class RecordedMemory {
 public:
  ~RecordedMemory() {
    for (const Block& block : blocks_) ::operator delete(block.start, kAlignment);
  }

  // Blocks are of powers of two, so that recordings of growing batches leave few behind that are too small. Large ones
  // also serve smaller results, so that recordings of shrinking batches leave none.
  void* take(int64_t bytes) {
    int64_t size = 4096;
    while (size < bytes) size *= 2;
    Block* found = nullptr;
    for (Block& block : blocks_) {
      const bool suits = block.size == size || (block.size > size && size >= kLarge);
      if (block.free && suits && (found == nullptr || block.size < found->size)) found = &block;
    }
    if (found == nullptr) {
      blocks_.push_back({static_cast<char*>(::operator new(size, kAlignment)), size, true});
      found = &blocks_.back();
    }
    found->free = false;
    return found->start;
  }

  // Give back the block of a tensor made in recording `number`; if that has ended, its block has been free since.
  void give_back(const void* start, int64_t number) {
    if (number != number_) return;
    for (Block& block : blocks_) {
      if (block.start == start) block.free = true;
    }
  }

  void finish() {
    ++number_;
    for (Block& block : blocks_) block.free = true;
  }

  // The number of the recording that is being made.
  int64_t number() const { return number_; }

  bool owns(const void* data) const {
    for (const Block& block : blocks_) {
      if (data >= block.start && data < block.start + block.size) return true;
    }
    return false;
  }

 private:
  struct Block {
    char* start;
    int64_t size;
    bool free;
  };
  static constexpr std::align_val_t kAlignment{64};
  static constexpr int64_t kLarge = 256 * 1024;
  std::vector<Block> blocks_;
  int64_t number_ = 0;
};

class Recording {
 public:
  // `defers`: calls are only written down.
  Recording(std::shared_ptr<RecordedMemory> memory, bool defers) : memory_(std::move(memory)), defers_(defers) {}

  // The one that calls on this thread are written into, or null.
  static Recording*& current() {
    thread_local Recording* recording = nullptr;
    return recording;
  }

  bool defers() const { return defers_; }
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  const std::shared_ptr<RecordedMemory>& memory() const { return memory_; }
  void keep(const torch::stable::Tensor& tensor) {
    if (!memory_->owns(tensor.data_ptr())) tensors_.push_back(tensor);
  }
  void keep(const std::optional<torch::stable::Tensor>& tensor) {
    if (tensor.has_value()) keep(*tensor);
  }
  // A contiguous tensor in this recording's memory.
  torch::stable::Tensor make_tensor(torch::headeronly::IntHeaderOnlyArrayRef sizes, torch::headeronly::ScalarType dtype,
                                    int64_t element_size) const {
    std::vector<int64_t> strides(sizes.size());
    int64_t count = 1;
    for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) strides[i] = count;
    void* start = memory_->take(count * element_size);
    const auto give_back = [memory = memory_, number = memory_->number()](void* data) {
      memory->give_back(data, number);
    };
    return torch::stable::from_blob(start, sizes, strides,
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), dtype, give_back);
  }

  void replay() const {
    for (const auto& call : calls_) call();
  }

  // Make the calls, and forget them.
  void flush() {
    replay();
    calls_.clear();
    tensors_.clear();
  }

 private:
  std::vector<std::function<void()>> calls_;
  std::vector<torch::stable::Tensor> tensors_;  // whose memory the calls point into, besides `memory_`
  std::shared_ptr<RecordedMemory> memory_;
  const bool defers_;
};

// A tensor that an operator fills and returns: uninitialised, of the dtype of `like`.
inline torch::stable::Tensor new_result(const torch::stable::Tensor& like,
                                        torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  const Recording* recording = Recording::current();
  return recording ? recording->make_tensor(sizes, like.scalar_type(), like.element_size())
                   : torch::stable::new_empty(like, sizes);
}

// The same of `dtype`, which has four bytes.
inline torch::stable::Tensor new_result(const torch::stable::Tensor& like,
                                        torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                        torch::headeronly::ScalarType dtype) {
  const Recording* recording = Recording::current();
  return recording ? recording->make_tensor(sizes, dtype, 4) : torch::stable::new_empty(like, sizes, dtype);
}

// Makes a call, unless calls are deferred, and writes it down when recording. `tensors` are all that its arguments point into.
template <typename Call, typename... Tensors>
void launch(Call call, const Tensors&... tensors) {
  Recording* recording = Recording::current();
  if (recording == nullptr || !recording->defers()) call();
  if (recording != nullptr) {
    recording->add(call);
    (recording->keep(tensors), ...);
  }
}

}  // namespace vllm_cpu
