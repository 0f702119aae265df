// The bindings of products read this of packed weights.
#pragma once

#include <optional>

#include "bindings.h"
#include "kernels.h"

namespace vllm_cpu {

// Whether a packed weight, of `inner` values a row (-1: any number), is in pairs.
inline bool is_in_pairs(const Tensor& packed, int64_t panels, int64_t inner) {
  const bool pairs = packed.dim() == 4;
  if (pairs) {
    check_shape(packed, "packed", {panels, inner < 0 ? inner : inner / 2, 32, 2});
    check_dtype(packed, "packed", ScalarType::BFloat16, "bfloat16 for packed_bf16_dot");
  } else {
    check_shape(packed, "packed", {panels, inner, 32});
  }
  check_contiguous(packed, "packed");
  return pairs;
}

// Panels of a product with `columns` results. When gated, a panel is 16 columns of a gate and 16 to multiply with it.
inline int64_t num_panels(int64_t columns, bool gated) { return gated ? (columns + 15) / 16 : (columns + 31) / 32; }

inline const float* scales_of(const Tensor& scales, int64_t panels) {
  check_shape(scales, "scales", {panels * 32});
  check_dtype(scales, "scales", ScalarType::Float, "float32");
  check_contiguous(scales, "scales");
  return static_cast<const float*>(scales.data_ptr());
}

// Bytes in blocks of 64 values of k, and bfloat16 scales in groups of 128: see kernels/linear_int8.cpp.
inline int64_t int8_panel_bytes(int64_t inner) {
  const int64_t blocks = (inner + 63) / 64;
  return 32 * (64 * blocks + 2 * ((blocks + 1) / 2));
}

inline void check_int8_weight(const Tensor& weight, int64_t panels, int64_t inner) {
  check_shape(weight, "weight", {panels, int8_panel_bytes(inner)});
  check_dtype(weight, "weight", ScalarType::Byte, "uint8");
  check_contiguous(weight, "weight");
}

inline int64_t size_of(Stored type) {
  switch (type) {
    case Stored::none:
    case Stored::u4_high:
      return 0;
    case Stored::f32:
      return 4;
    case Stored::f16:
    case Stored::bf16:
      return 2;
    default:
      return 1;
  }
}

// See quantized_panels.h.
inline PanelLayout panel_layout(const Quantized& q) {
  PanelLayout at{};
  const int64_t groups = q.groups * 32, supers = q.supers * 32;
  at.scales = (q.group_size + 7) / 8 * groups * q.bits;
  at.offsets = at.scales + groups * size_of(q.scales);
  at.zeros = at.offsets + groups * size_of(q.offsets);
  at.super_scales = at.zeros + groups * size_of(q.zeros);
  at.super_offsets = at.super_scales + supers * size_of(q.super_scales);
  at.tables = at.super_offsets + supers * size_of(q.super_offsets);
  at.size = at.tables + (q.values == Values::tables ? (int64_t{32} << q.bits) * 4 : 0);
  // Whole cache lines.
  at.size = (at.size + 63) / 64 * 64;
  if (q.offsets == Stored::u4_high) at.offsets = at.scales;
  return at;
}

// The parts of a quantised weight: those that its description, int64 [kDescription], speaks of, and lookup tables.
struct QuantizedParts {
  const Tensor &panels, &description;
  const std::optional<Tensor>&table, &order, &sparse_starts, &sparse_columns, &sparse_places, &sparse_values;

  static constexpr int64_t kDescription = 11;

  Quantized read(int64_t inner, int64_t num_panels) const {
    check_shape(description, "description", {kDescription});
    check_dtype(description, "description", ScalarType::Long, "int64");
    check_contiguous(description, "description");
    const int64_t* numbers = static_cast<const int64_t*>(description.data_ptr());
    Quantized q{};
    q.bits = numbers[0];
    q.values = static_cast<Values>(numbers[1]);
    q.group_size = numbers[2];
    q.groups = numbers[3];
    q.supers = numbers[4];
    q.zero = static_cast<float>(numbers[5]);
    Stored* types[] = {&q.scales, &q.offsets, &q.zeros, &q.super_scales, &q.super_offsets};
    for (int i = 0; i < 5; ++i) *types[i] = static_cast<Stored>(numbers[6 + i]);
    STD_TORCH_CHECK(q.groups * q.group_size >= inner, "description must have groups for x's ", inner, " columns");
    q.at = panel_layout(q);
    check_dtype(panels, "panels", ScalarType::Byte, "uint8");
    check_contiguous(panels, "panels");
    check_shape(panels, "panels", {num_panels, q.at.size});
    q.table = read_part<float>(table, "table", ScalarType::Float, 16);
    q.order = read_part<int64_t>(order, "order", ScalarType::Long, inner);
    q.sparse_starts = read_part<int32_t>(sparse_starts, "sparse_starts", ScalarType::Int, -1);
    q.sparse_columns = read_part<int32_t>(sparse_columns, "sparse_columns", ScalarType::Int, -1);
    q.sparse_places = read_part<int32_t>(sparse_places, "sparse_places", ScalarType::Int, -1);
    q.sparse_values = read_part<float>(sparse_values, "sparse_values", ScalarType::Float, -1);
    return q;
  }

 private:
  template <typename T>
  static const T* read_part(const std::optional<Tensor>& part, const char* name, ScalarType dtype, int64_t size) {
    if (!part.has_value()) return nullptr;
    check_shape(*part, name, {size});
    check_contiguous(*part, name);
    check_dtype(*part, name, dtype, "of the kind that belongs there");
    return static_cast<const T*>(part->data_ptr());
  }
};

// Whether a weight can be multiplied with bytes, if it is to be.
inline void check_int8_product(bool int8, const Quantized& q) {
  STD_TORCH_CHECK(!int8 || (q.values == Values::integers && q.sparse_starts == nullptr),
                  "int8 products need codes that are integers, and no sparse values");
}

}  // namespace vllm_cpu
