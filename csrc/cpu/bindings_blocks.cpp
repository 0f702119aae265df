// The operators that copy blocks and sum their bytes. They move memory: no level of instructions matters.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "bindings.h"

namespace vllm_cpu {
namespace {

// See utils/kv_store/segment.py.
constexpr int64_t kSectorBytes = 512, kSumLanes = 8;
// Fewer bytes are copied before other threads have begun.
constexpr int64_t kManyBytes = 256 * 1024;

// Parts of blocks: part p of block b is at addresses[p] + b * strides[p].
struct BlockParts {
  const int64_t *addresses, *strides, *sizes;
  int64_t count;
};

BlockParts block_parts_of(const Tensor& table, const char* name) {
  check_dtype(table, name, ScalarType::Long, "int64");
  check_shape(table, name, {3, -1});
  check_contiguous(table, name);
  const int64_t count = table.size(1);
  const int64_t* rows = data_of<const int64_t>(table);
  return {rows, rows + count, rows + 2 * count, count};
}

const int64_t* block_ids_of(const Tensor& ids, const char* name, int64_t count, int64_t num_blocks) {
  check_dtype(ids, name, ScalarType::Long, "int64");
  check_shape(ids, name, {count});
  check_contiguous(ids, name);
  const int64_t* found = data_of<const int64_t>(ids);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(found[i] >= 0 && found[i] < num_blocks, name, " must be in [0, ", num_blocks, "), got ", found[i]);
  }
  return found;
}

inline void add_sector(const char* data, uint64_t factor, uint64_t* totals) {
  uint64_t sums[kSumLanes] = {}, words[kSumLanes];
  for (int64_t at = 0; at < kSectorBytes; at += sizeof(words)) {
    std::memcpy(words, data + at, sizeof(words));
    for (int64_t lane = 0; lane < kSumLanes; ++lane) sums[lane] += words[lane];
  }
  for (int64_t lane = 0; lane < kSumLanes; ++lane) totals[lane] += factor * sums[lane];
}

// The sum of `size` bytes.
int64_t sum_of(const char* data, int64_t size) {
  uint64_t totals[kSumLanes] = {}, factor = 1, total = size;
  int64_t at = 0;
  for (; at + kSectorBytes <= size; at += kSectorBytes, factor += 2) add_sector(data + at, factor, totals);
  if (at < size) {
    char tail[kSectorBytes] = {};
    std::memcpy(tail, data + at, size - at);
    add_sector(tail, factor, totals);
  }
  for (int64_t lane = 0; lane < kSumLanes; ++lane) total += totals[lane];
  return static_cast<int64_t>(total);
}

// `sums`: of the target blocks, whose parts lie one after the other then.
void copy_blocks_(Tensor source_ids, Tensor target_ids, Tensor source, Tensor target, int64_t num_source,
                  int64_t num_target, std::optional<Tensor> sums) {
  const BlockParts from = block_parts_of(source, "source"), to = block_parts_of(target, "target");
  STD_TORCH_CHECK(from.count == to.count && std::equal(from.sizes, from.sizes + from.count, to.sizes),
                  "source and target must have parts of the same sizes");
  const int64_t count = source_ids.numel();
  const int64_t* sources = block_ids_of(source_ids, "source_ids", count, num_source);
  const int64_t* targets = block_ids_of(target_ids, "target_ids", count, num_target);
  int64_t size = 0;
  for (int64_t part = 0; part < to.count; ++part) {
    STD_TORCH_CHECK(!sums.has_value() || (to.addresses[part] == to.addresses[0] + size && to.strides[part] == to.strides[0]),
                    "sums are of blocks whose parts lie one after the other");
    size += to.sizes[part];
  }
  int64_t* totals = nullptr;
  if (sums.has_value()) {
    check_dtype(*sums, "sums", ScalarType::Long, "int64");
    check_shape(*sums, "sums", {count});
    check_contiguous(*sums, "sums");
    totals = data_of<int64_t>(*sums);
  }
#pragma omp parallel for schedule(static) if (count * size >= kManyBytes)
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t part = 0; part < to.count; ++part) {
      std::memcpy(reinterpret_cast<char*>(to.addresses[part] + targets[i] * to.strides[part]),
                  reinterpret_cast<const char*>(from.addresses[part] + sources[i] * from.strides[part]), to.sizes[part]);
    }
    // The block is in the thread's cache now.
    if (totals != nullptr) {
      totals[i] = sum_of(reinterpret_cast<const char*>(to.addresses[0] + targets[i] * to.strides[0]), size);
    }
  }
}

// In the calling thread alone: those that read and write files have no others.
Tensor block_sums(Tensor rows) {
  check_dtype(rows, "rows", ScalarType::Byte, "uint8");
  check_shape(rows, "rows", {-1, -1});
  check_contiguous(rows, "rows");
  Tensor sums = torch::stable::new_empty(rows, {rows.size(0)}, ScalarType::Long);
  for (int64_t i = 0; i < rows.size(0); ++i) {
    data_of<int64_t>(sums)[i] = sum_of(data_of<const char>(rows) + i * rows.size(1), rows.size(1));
  }
  return sums;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "copy_blocks_(Tensor source_ids, Tensor target_ids, Tensor source, Tensor target, int num_source, "
      "int num_target, Tensor(a!)? sums) -> ()");
  m.def("block_sums(Tensor rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("copy_blocks_", TORCH_BOX(&vllm_cpu::copy_blocks_));
  m.impl("block_sums", TORCH_BOX(&vllm_cpu::block_sums));
}
