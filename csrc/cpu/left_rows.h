// Rows of x that a fast product would lose something of: it leaves them to one with float32 sums. What is left follows from a
// row's values alone, so that a row's result does not depend on the others.
//
// Include only from kernels/*.cpp.
#pragma once

#include "gemm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// A product's leave_row: mark row `row`, whose values are `x`, as left.
inline void mark_left(const LinearArgs& a, const BF16* x, int64_t row) {
  a.left[row] = 1;
  if (a.left_rows != nullptr) std::memcpy(a.left_rows + row * a.inner, x, static_cast<size_t>(a.inner) * sizeof(BF16));
}

// The marked rows' results by `below`, in place of those that are there.
[[gnu::noinline]] inline void multiply_left(const LinearArgs& a, int64_t count, void (*below)(const LinearArgs&)) {
  const size_t row_bytes = static_cast<size_t>(a.inner) * sizeof(BF16);
  const int64_t value_bytes = a.float_out ? sizeof(float) : sizeof(BF16);
  const Scratch<BF16> x(count * a.inner);
  const Scratch<char> out(count * a.out_columns * value_bytes);
  LinearArgs rest = a;
  rest.x = x.get();
  rest.x_stride = a.inner;
  rest.rows = count;
  rest.out = out.get();
  rest.out_stride = a.out_columns;
  rest.residual = nullptr;
  rest.row_ids = nullptr;
  const auto row_at = [&](int64_t row) {
    return a.left_rows != nullptr ? a.left_rows + row * a.inner : static_cast<const BF16*>(a.x) + row_of_x(a, row) * a.x_stride;
  };
  const int64_t width = a.adapted.groups * kRankGroup;
  const Scratch<AdaptedRow> adapted_rows(a.adapted.b == nullptr ? 0 : count);
  const Scratch<AdaptedValue<BF16>> products(a.adapted.b == nullptr ? 0 : count * width);
  // They have been multiplied with A, and are in order.
  rest.adapted.order = nullptr;
  rest.adapted.adapted_rows = adapted_rows.get();
  rest.adapted.products = products.get();
  for (int64_t place = 0, at = 0; place < a.rows; ++place) {
    const int64_t row = row_in_place(a, place);
    if (!a.left[row]) continue;
    std::memcpy(x.get() + at * a.inner, row_at(row), row_bytes);
    if (a.adapted.b != nullptr) {
      adapted_rows[at] = a.adapted.adapted_rows[place];
      std::memcpy(products.get() + at * width, static_cast<const AdaptedValue<BF16>*>(a.adapted.products) + place * width,
                  static_cast<size_t>(width) * sizeof(AdaptedValue<BF16>));
    }
    ++at;
  }
  below(rest);
  const char* from = out.get();
  for (int64_t place = 0; place < a.rows; ++place) {
    const int64_t row = row_in_place(a, place);
    if (!a.left[row]) continue;
    const size_t bytes = static_cast<size_t>(a.out_columns * value_bytes);
    std::memcpy(static_cast<char*>(a.out) + row * a.out_stride * value_bytes, from, bytes);
    from += bytes;
  }
}

// x W^T by the product, but of the rows that it leaves by `below`.
template <typename Product>
void multiply_or_leave(LinearArgs a, void (*below)(const LinearArgs&)) {
  const Scratch<uint8_t> left(a.rows);
  std::memset(left.get(), 0, static_cast<size_t>(a.rows));
  const Scratch<BF16> normed(a.residual == nullptr ? 0 : a.rows * a.inner);
  a.left = left.get();
  a.left_rows = normed.get();
  const AdaptedMemory<BF16> adapted(a);
  Gemm<Product>::run(a);
  int64_t count = 0;
  for (int64_t row = 0; row < a.rows; ++row) count += left[row];
  if (count > 0) multiply_left(a, count, below);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
