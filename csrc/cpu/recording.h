// Kernel calls written down as they are made, to be made again without PyTorch in between: for a few rows, its operators
// take about as long as the kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace vllm_cpu {

class Recording {
 public:
  // The one that calls on this thread are written into, or null.
  static Recording*& current() {
    thread_local Recording* recording = nullptr;
    return recording;
  }

  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  void keep(const torch::stable::Tensor& tensor) { tensors_.push_back(tensor); }
  void keep(const std::optional<torch::stable::Tensor>& tensor) {
    if (tensor.has_value()) keep(*tensor);
  }
  void replay() const {
    for (const auto& call : calls_) call();
  }

 private:
  std::vector<std::function<void()>> calls_;
  std::vector<torch::stable::Tensor> tensors_;  // whose memory the calls point into
};

// Makes a call, and writes it down when recording. `tensors` are all that its arguments point into.
template <typename Call, typename... Tensors>
void launch(Call call, const Tensors&... tensors) {
  call();
  if (Recording* recording = Recording::current()) {
    recording->add(call);
    (recording->keep(tensors), ...);
  }
}

}  // namespace vllm_cpu
