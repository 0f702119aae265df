// The operators that record kernel calls and make them again; ops/recording.py is who calls them.
#include "bindings.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

Recording* recording_of(int64_t handle) { return reinterpret_cast<Recording*>(handle); }

std::shared_ptr<RecordedMemory>* memory_of(int64_t handle) {
  return reinterpret_cast<std::shared_ptr<RecordedMemory>*>(handle);
}

int64_t make_recorded_memory() {
  return reinterpret_cast<int64_t>(new std::shared_ptr<RecordedMemory>(new RecordedMemory));
}

void free_recorded_memory(int64_t handle) { delete memory_of(handle); }

int64_t start_recording(int64_t memory, bool defers) {
  STD_TORCH_CHECK(Recording::current() == nullptr, "this thread records already");
  Recording::current() = new Recording(*memory_of(memory), defers);
  return reinterpret_cast<int64_t>(Recording::current());
}

void stop_recording() {
  Recording::current()->memory()->finish();
  Recording::current() = nullptr;
}

// uint8 [size] of the recording's memory.
Tensor recorded_bytes(int64_t size) {
  STD_TORCH_CHECK(Recording::current() != nullptr, "this thread does not record");
  return Recording::current()->make_tensor({&size, 1}, ScalarType::Byte, 1);
}

void replay_recording(int64_t handle) { recording_of(handle)->replay(); }

void flush_recording(int64_t handle) { recording_of(handle)->flush(); }

void free_recording(int64_t handle) { delete recording_of(handle); }

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("make_recorded_memory() -> int");
  m.def("free_recorded_memory(int handle) -> ()");
  m.def("start_recording(int memory, bool defers=False) -> int");
  m.def("stop_recording() -> ()");
  m.def("recorded_bytes(int size) -> Tensor");
  m.def("replay_recording(int handle) -> ()");
  m.def("flush_recording(int handle) -> ()");
  m.def("free_recording(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("make_recorded_memory", TORCH_BOX(&vllm_cpu::make_recorded_memory));
  m.impl("free_recorded_memory", TORCH_BOX(&vllm_cpu::free_recorded_memory));
  m.impl("start_recording", TORCH_BOX(&vllm_cpu::start_recording));
  m.impl("stop_recording", TORCH_BOX(&vllm_cpu::stop_recording));
  m.impl("recorded_bytes", TORCH_BOX(&vllm_cpu::recorded_bytes));
  m.impl("replay_recording", TORCH_BOX(&vllm_cpu::replay_recording));
  m.impl("flush_recording", TORCH_BOX(&vllm_cpu::flush_recording));
  m.impl("free_recording", TORCH_BOX(&vllm_cpu::free_recording));
}
