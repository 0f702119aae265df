// The operators of encoders' layers.
#include <optional>

#include "bindings.h"
#include "kernels_encoder.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

void check_starts(const Tensor& cu_seqlens, int64_t tokens) {
  const int32_t* starts = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  const int64_t texts = cu_seqlens.size(0) - 1;
  bool ascends = starts[0] == 0 && starts[texts] == tokens;
  for (int64_t text = 0; text < texts; ++text) ascends = ascends && starts[text] <= starts[text + 1];
  STD_TORCH_CHECK(ascends, "cu_seqlens must ascend from 0 to q's ", tokens, " tokens");
}

const int32_t* checked_seen(const Tensor& seqused_k, const int32_t* starts, int64_t texts) {
  check_shape(seqused_k, "seqused_k", {texts});
  check_dtype(seqused_k, "seqused_k", ScalarType::Int, "int32");
  check_contiguous(seqused_k, "seqused_k");
  const int32_t* seen = static_cast<const int32_t*>(seqused_k.data_ptr());
  for (int64_t text = 0; text < texts; ++text) {
    const int64_t length = starts[text + 1] - starts[text];
    STD_TORCH_CHECK(seen[text] >= 0 && seen[text] <= length, "seqused_k must be between 0 and a text's length, ", length,
                    ", got ", seen[text]);
  }
  return seen;
}

Tensor packed_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, double scale, int64_t left, int64_t right,
                        double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> seqused_k) {
  PackedAttentionArgs args{};
  args.dtype = dtype_of(q, "q");
  check_same_dtype(k, "k", q, "q");
  check_same_dtype(v, "v", q, "q");
  args.q = heads_of(q, "q");
  args.k = heads_of(k, "k");
  args.v = heads_of(v, "v");
  args.head_dim = q.size(2);
  check_shape(k, "k", {q.size(0), -1, q.size(2)});
  check_shape(v, "v", {q.size(0), k.size(1), q.size(2)});
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q must have a multiple of k's ", k.size(1),
                  " heads, got ", q.size(1));
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0, "cu_seqlens must have shape [texts + 1]");
  check_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int, "int32");
  check_contiguous(cu_seqlens, "cu_seqlens");
  check_starts(cu_seqlens, q.size(0));
  args.starts = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  args.texts = cu_seqlens.size(0) - 1;
  if (seqused_k) args.seen = checked_seen(*seqused_k, args.starts, args.texts);
  args.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(left >= -1 && right >= -1, "window must be of at least 0 tokens on either side, or -1 for all, got ",
                  left, " and ", right);
  args.windowed = left >= 0 || right >= 0;
  args.left = left < 0 ? q.size(0) : left;
  args.right = right < 0 ? q.size(0) : right;
  STD_TORCH_CHECK(softcap >= 0, "softcap must be positive, or 0 for none, got ", softcap);
  args.softcap = static_cast<float>(softcap);
  if (alibi_slopes) {
    check_shape(*alibi_slopes, "alibi_slopes", {q.size(1)});
    check_dtype(*alibi_slopes, "alibi_slopes", ScalarType::Float, "float32");
    check_contiguous(*alibi_slopes, "alibi_slopes");
    args.alibi_slopes = static_cast<const float*>(alibi_slopes->data_ptr());
  }
  args.dots = args.dtype == DType::bf16 && args.head_dim % 2 == 0 && has_fast_bf16_dot();
  Tensor out = new_result(q, q.sizes());
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(packed_attention)] { kernel(args); }, q, k, v, cu_seqlens, alibi_slopes, seqused_k,
         out);
  return out;
}

// Null, or the values of a norm's weight or bias, one row or one a head.
const void* norm_values(const std::optional<Tensor>& t, const char* name, const Tensor& x, LayerNormArgs* args) {
  if (!t) return nullptr;
  const int64_t last = x.dim() - 1;
  if (t->dim() == 1) {
    check_shape(*t, name, {x.size(last)});
  } else {
    STD_TORCH_CHECK(last == 2, name, " must have 1 dimension for an x of 2, got ", t->dim());
    check_shape(*t, name, {x.size(1), x.size(2)});
    args->weight_stride = x.size(2);
  }
  check_contiguous(*t, name);
  args->wide_weight = t->scalar_type() == ScalarType::Float;
  if (!args->wide_weight) check_same_dtype(*t, name, x, "x, or be float32");
  return t->data_ptr();
}

LayerNormArgs norm_args(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& out, double eps) {
  const int64_t last = x.dim() - 1;
  STD_TORCH_CHECK(last == 1 || last == 2, "x must have 2 or 3 dimensions, got ", x.dim());
  check_last_contiguous(x, "x");
  LayerNormArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.weight = norm_values(weight, "weight", x, &args);
  args.bias = norm_values(bias, "bias", x, &args);
  if (weight && bias) {
    STD_TORCH_CHECK(weight->dim() == bias->dim(), "bias must have the shape of weight");
    check_same_dtype(*bias, "bias", *weight, "weight");
  }
  args.out = out.data_ptr();
  args.rows = x.size(0);
  args.hidden = x.size(last);
  args.x_stride = x.stride(0);
  args.heads = last == 1 ? 1 : x.size(1);
  args.head_stride = last == 1 ? 0 : x.stride(1);
  args.eps = static_cast<float>(eps);
  return args;
}

Tensor layer_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  Tensor out = new_result(x, x.sizes());
  const LayerNormArgs args = norm_args(x, weight, bias, out, eps);
  launch([args, kernel = VLLM_KERNEL(layer_norm)] { kernel(args); }, x, weight, bias, out);
  return out;
}

Tensor fused_add_layer_norm_(Tensor x, Tensor residual, std::optional<Tensor> weight, std::optional<Tensor> bias,
                             double eps) {
  check_shape(x, "x", {-1, -1});
  Tensor out = new_result(x, x.sizes());
  LayerNormArgs args = norm_args(x, weight, bias, out, eps);
  check_shape(residual, "residual", {x.size(0), x.size(1)});
  check_last_contiguous(residual, "residual");
  check_same_dtype(residual, "residual", x, "x");
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  launch([args, kernel = VLLM_KERNEL(layer_norm)] { kernel(args); }, x, residual, weight, bias, out);
  return out;
}

void activation_(Tensor x, int64_t curve) {
  check_contiguous(x, "x");
  STD_TORCH_CHECK(curve >= 0 && curve <= static_cast<int64_t>(Curve::mish), "there is no activation ", curve);
  const ActivationArgs args{dtype_of(x, "x"), static_cast<Curve>(curve), x.data_ptr(), x.numel()};
  launch([args, kernel = VLLM_KERNEL(activation)] { kernel(args); }, x);
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "packed_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int left=-1, int right=-1, "
      "float softcap=0., Tensor? alibi_slopes=None, Tensor? seqused_k=None) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def(
      "fused_add_layer_norm_(Tensor x, Tensor(a!) residual, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def("activation_(Tensor(a!) x, int curve) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("packed_attention", TORCH_BOX(&vllm_cpu::packed_attention));
  m.impl("layer_norm", TORCH_BOX(&vllm_cpu::layer_norm));
  m.impl("fused_add_layer_norm_", TORCH_BOX(&vllm_cpu::fused_add_layer_norm_));
  m.impl("activation_", TORCH_BOX(&vllm_cpu::activation_));
}
