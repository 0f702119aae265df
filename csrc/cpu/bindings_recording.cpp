// The operators that record kernel calls and make them again; ops/recording.py is who calls them.
#include "bindings.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

Recording* recording_of(int64_t handle) { return reinterpret_cast<Recording*>(handle); }

int64_t start_recording() {
  STD_TORCH_CHECK(Recording::current() == nullptr, "this thread records already");
  Recording::current() = new Recording;
  return reinterpret_cast<int64_t>(Recording::current());
}

void stop_recording() { Recording::current() = nullptr; }

void replay_recording(int64_t handle) { recording_of(handle)->replay(); }

void free_recording(int64_t handle) { delete recording_of(handle); }

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("start_recording() -> int");
  m.def("stop_recording() -> ()");
  m.def("replay_recording(int handle) -> ()");
  m.def("free_recording(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("start_recording", TORCH_BOX(&vllm_cpu::start_recording));
  m.impl("stop_recording", TORCH_BOX(&vllm_cpu::stop_recording));
  m.impl("replay_recording", TORCH_BOX(&vllm_cpu::replay_recording));
  m.impl("free_recording", TORCH_BOX(&vllm_cpu::free_recording));
}
