// The adapters of a product with a packed weight, as bindings hold them: made and checked once.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"

namespace vllm_cpu {

struct AdaptedWeights {
  AdaptedArgs args;  // all but which rows have them
  DType dtype;
  int64_t inner, columns;  // columns up to whole panels
  std::vector<Tensor> kept;
};

// Adapters, `handle` (0: none), and a product's rows by adapter.
struct Adapters {
  int64_t handle;
  const std::optional<Tensor>&order, &starts;

  // Sets the product's, which has all its other arguments, and returns what must outlive it.
  std::shared_ptr<AdaptedWeights> set(LinearArgs& args) const {
    if (handle == 0) return nullptr;
    const std::shared_ptr<AdaptedWeights> own = *reinterpret_cast<std::shared_ptr<AdaptedWeights>*>(handle);
    STD_TORCH_CHECK(own->dtype == args.dtype, "adapters must have the dtype of x");
    STD_TORCH_CHECK(own->inner == args.inner, "x must have ", own->inner, " columns for its adapters, got ", args.inner);
    STD_TORCH_CHECK(own->columns == (args.columns + 31) / 32 * 32, "adapters are of a weight with ", own->columns,
                    " columns in its panels, got ", args.columns);
    STD_TORCH_CHECK(order.has_value() && starts.has_value(), "adapters need order and starts");
    args.adapted = own->args;
    args.adapted.order = numbers(*order, "order", args.rows);
    args.adapted.starts = numbers(*starts, "starts", own->args.adapters + 1);
    return own;
  }

 private:
  static const int32_t* numbers(const Tensor& t, const char* name, int64_t size) {
    check_shape(t, name, {size});
    check_contiguous(t, name);
    check_dtype(t, name, ScalarType::Int, "int32");
    return static_cast<const int32_t*>(t.data_ptr());
  }
};

}  // namespace vllm_cpu
