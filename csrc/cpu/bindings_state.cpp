// The operators of layers that keep a state from token to token.
#include <optional>

#include "bindings.h"
#include "kernels_state.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

StateRows rows_of(const Tensor& slots, const Tensor& starts, const Tensor& lengths) {
  check_shape(slots, "state_slots", {-1});
  check_contiguous(slots, "state_slots");
  check_dtype(slots, "state_slots", ScalarType::Long, "int64");
  const int64_t rows = slots.size(0);
  check_shape(starts, "query_start_loc", {rows + 1});
  check_contiguous(starts, "query_start_loc");
  check_dtype(starts, "query_start_loc", ScalarType::Int, "int32");
  check_shape(lengths, "seq_lens", {rows});
  check_contiguous(lengths, "seq_lens");
  check_dtype(lengths, "seq_lens", ScalarType::Int, "int32");
  return {static_cast<const int64_t*>(slots.data_ptr()), static_cast<const int32_t*>(starts.data_ptr()),
          static_cast<const int32_t*>(lengths.data_ptr()), rows};
}

// The slot stride of a pool whose slots are contiguous.
int64_t slot_stride_of(const Tensor& pool) {
  int64_t stride = 1;
  for (int64_t i = pool.dim() - 1; i > 0; --i) {
    STD_TORCH_CHECK(pool.size(i) <= 1 || pool.stride(i) == stride, "a slot of the pool must be contiguous");
    stride *= pool.size(i);
  }
  return pool.stride(0);
}

// [tokens, width], the last dimension contiguous, of x's dtype.
const void* columns(const Tensor& t, const char* name, int64_t tokens, int64_t width, const Tensor& x, int64_t* stride) {
  check_shape(t, name, {tokens, width});
  check_last_contiguous(t, name);
  check_same_dtype(t, name, x, "the first argument");
  *stride = t.stride(0);
  return t.data_ptr();
}

const float* floats(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes) {
  check_shape(t, name, sizes);
  check_contiguous(t, name);
  check_dtype(t, name, ScalarType::Float, "float32");
  return static_cast<const float*>(t.data_ptr());
}

Tensor short_conv(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor tail, Tensor slots, Tensor starts,
                  Tensor lengths, bool silu, std::optional<Tensor> before, std::optional<Tensor> after) {
  ShortConvArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(weight, "weight", {-1, -1});
  check_contiguous(weight, "weight");
  check_same_dtype(weight, "weight", x, "x");
  args.width = weight.size(0);
  args.channels = weight.size(1);
  STD_TORCH_CHECK(args.width >= 2 && args.width <= 8, "weight must have 2 to 8 rows, got ", args.width);
  const int64_t tokens = x.size(0);
  args.dtype = dtype_of(x, "x");
  args.x = columns(x, "x", tokens, args.channels, x, &args.x_stride);
  args.weight = weight.data_ptr();
  if (bias.has_value()) {
    check_shape(*bias, "bias", {args.channels});
    check_contiguous(*bias, "bias");
    check_same_dtype(*bias, "bias", x, "x");
    args.bias = bias->data_ptr();
  }
  if (before.has_value()) args.before = columns(*before, "before", tokens, args.channels, x, &args.before_stride);
  if (after.has_value()) args.after = columns(*after, "after", tokens, args.channels, x, &args.after_stride);
  check_shape(tail, "tail", {-1, args.width - 1, args.channels});
  check_same_dtype(tail, "tail", x, "x");
  args.slot_stride = slot_stride_of(tail);
  args.pool = tail.data_ptr();
  args.silu = silu;
  Tensor out = new_result(x, {tokens, args.channels});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(short_conv)] { kernel(args); }, x, weight, bias, tail, slots, starts, lengths, before,
         after, out);
  return out;
}

Tensor gated_delta_rule(Tensor qkv, Tensor decay, Tensor beta, Tensor rate, Tensor bias, Tensor pool, Tensor slots,
                        Tensor starts, Tensor lengths, int64_t key_heads, double beta_scale, double bound,
                        double eps) {
  DeltaRuleArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, -1, -1, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.heads = pool.size(1);
  args.key_dim = pool.size(2);
  args.value_dim = pool.size(3);
  args.key_heads = key_heads;
  STD_TORCH_CHECK(key_heads > 0 && args.heads % key_heads == 0, "key_heads must divide ", args.heads, ", got ", key_heads);
  const int64_t tokens = qkv.size(0), width = 2 * key_heads * args.key_dim + args.heads * args.value_dim;
  args.dtype = dtype_of(qkv, "qkv");
  args.qkv = columns(qkv, "qkv", tokens, width, qkv, &args.qkv_stride);
  args.by_channel = decay.size(1) != args.heads;
  const int64_t decays = args.by_channel ? args.heads * args.key_dim : args.heads;
  args.decay = columns(decay, "decay", tokens, decays, qkv, &args.decay_stride);
  args.beta = columns(beta, "beta", tokens, args.heads, qkv, &args.beta_stride);
  args.rate = floats(rate, "rate", {args.heads});
  args.bias = floats(bias, "bias", {decays});
  args.beta_scale = static_cast<float>(beta_scale);
  args.bound = static_cast<float>(bound);
  args.eps = static_cast<float>(eps);
  Tensor out = new_result(qkv, {tokens, args.heads * args.value_dim});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(gated_delta_rule)] { kernel(args); }, qkv, decay, beta, rate, bias, pool, slots, starts,
         lengths, out);
  return out;
}

Tensor state_space_scan(Tensor xbc, Tensor dt, Tensor rate, Tensor bias, std::optional<Tensor> skip, Tensor pool,
                        Tensor slots, Tensor starts, Tensor lengths, int64_t groups, double dt_min, double dt_max) {
  StateSpaceArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, -1, -1, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.heads = pool.size(1);
  args.state_dim = pool.size(2);
  args.head_dim = pool.size(3);
  args.groups = groups;
  STD_TORCH_CHECK(groups > 0 && args.heads % groups == 0, "groups must divide ", args.heads, ", got ", groups);
  const int64_t tokens = xbc.size(0), width = args.heads * args.head_dim + 2 * groups * args.state_dim;
  args.dtype = dtype_of(xbc, "xbc");
  args.xbc = columns(xbc, "xbc", tokens, width, xbc, &args.xbc_stride);
  args.dt = columns(dt, "dt", tokens, args.heads, xbc, &args.dt_stride);
  args.rate = floats(rate, "rate", {args.heads});
  args.bias = floats(bias, "bias", {args.heads});
  args.skip = skip.has_value() ? floats(*skip, "skip", {args.heads}) : nullptr;
  args.dt_min = static_cast<float>(dt_min);
  args.dt_max = static_cast<float>(dt_max);
  Tensor out = new_result(xbc, {tokens, args.heads * args.head_dim});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(state_space_scan)] { kernel(args); }, xbc, dt, rate, bias, skip, pool, slots, starts,
         lengths, out);
  return out;
}

Tensor selective_scan(Tensor x, Tensor dt, Tensor b, Tensor c, std::optional<Tensor> gate, Tensor rate,
                      std::optional<Tensor> bias, Tensor skip, Tensor pool, Tensor slots, Tensor starts, Tensor lengths) {
  SelectiveScanArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, -1, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.state_dim = pool.size(1);
  args.channels = pool.size(2);
  const int64_t tokens = x.size(0);
  args.dtype = dtype_of(x, "x");
  args.x = columns(x, "x", tokens, args.channels, x, &args.x_stride);
  args.dt = columns(dt, "dt", tokens, args.channels, x, &args.dt_stride);
  args.groups = args.state_dim == 0 ? 1 : b.size(1) / args.state_dim;
  STD_TORCH_CHECK(args.groups > 0 && args.channels % args.groups == 0, "b's groups must divide ", args.channels);
  args.b = columns(b, "b", tokens, args.groups * args.state_dim, x, &args.b_stride);
  args.c = columns(c, "c", tokens, args.groups * args.state_dim, x, &args.c_stride);
  if (gate.has_value()) args.gate = columns(*gate, "gate", tokens, args.channels, x, &args.gate_stride);
  args.rate = floats(rate, "rate", {args.state_dim, args.channels});
  args.bias = bias.has_value() ? floats(*bias, "bias", {args.channels}) : nullptr;
  args.skip = floats(skip, "skip", {args.channels});
  Tensor out = new_result(x, {tokens, args.channels});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(selective_scan)] { kernel(args); }, x, dt, b, c, gate, rate, bias, skip, pool, slots,
         starts, lengths, out);
  return out;
}

Tensor gated_recurrence(Tensor x, Tensor input_gate, Tensor kept_gate, Tensor input_bias, Tensor kept_bias, Tensor rate,
                        Tensor pool, Tensor slots, Tensor starts, Tensor lengths) {
  GatedRecurrenceArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.channels = pool.size(1);
  const int64_t tokens = x.size(0);
  args.dtype = dtype_of(x, "x");
  args.x = columns(x, "x", tokens, args.channels, x, &args.x_stride);
  args.input_gate = columns(input_gate, "input_gate", tokens, args.channels, x, &args.input_stride);
  args.kept_gate = columns(kept_gate, "kept_gate", tokens, args.channels, x, &args.kept_stride);
  args.input_bias = floats(input_bias, "input_bias", {args.channels});
  args.kept_bias = floats(kept_bias, "kept_bias", {args.channels});
  args.rate = floats(rate, "rate", {args.channels});
  Tensor out = new_result(x, {tokens, args.channels});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(gated_recurrence)] { kernel(args); }, x, input_gate, kept_gate, input_bias, kept_bias,
         rate, pool, slots, starts, lengths, out);
  return out;
}

Tensor wkv(Tensor key, Tensor value, Tensor gate, Tensor rate, Tensor bonus, Tensor pool, Tensor slots, Tensor starts,
           Tensor lengths) {
  WkvArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, 3, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.channels = pool.size(2);
  const int64_t tokens = key.size(0);
  args.dtype = dtype_of(key, "key");
  args.key = columns(key, "key", tokens, args.channels, key, &args.key_stride);
  args.value = columns(value, "value", tokens, args.channels, key, &args.value_stride);
  args.gate = columns(gate, "gate", tokens, args.channels, key, &args.gate_stride);
  args.rate = floats(rate, "rate", {args.channels});
  args.bonus = floats(bonus, "bonus", {args.channels});
  Tensor out = new_result(key, {tokens, args.channels});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(wkv)] { kernel(args); }, key, value, gate, rate, bonus, pool, slots, starts, lengths,
         out);
  return out;
}

Tensor mlstm(Tensor qkv, Tensor gates, Tensor pool, Tensor slots, Tensor starts, Tensor lengths, int64_t key_dim,
             double cap, double eps) {
  MlstmArgs args{};
  args.rows = rows_of(slots, starts, lengths);
  check_shape(pool, "pool", {-1, -1, -1});
  check_dtype(pool, "pool", ScalarType::Float, "float32");
  args.slot_stride = slot_stride_of(pool);
  args.pool = static_cast<float*>(pool.data_ptr());
  args.heads = pool.size(1);
  args.key_dim = key_dim;
  STD_TORCH_CHECK(key_dim > 0, "key_dim must be positive, got ", key_dim);
  args.value_dim = (pool.size(2) - key_dim - 1) / key_dim;
  check_shape(pool, "pool", {-1, -1, key_dim * args.value_dim + key_dim + 1});
  const int64_t tokens = qkv.size(0), width = args.heads * (2 * key_dim + args.value_dim);
  args.dtype = dtype_of(qkv, "qkv");
  args.qkv = columns(qkv, "qkv", tokens, width, qkv, &args.qkv_stride);
  args.gates = columns(gates, "gates", tokens, 2 * args.heads, qkv, &args.gates_stride);
  args.cap = static_cast<float>(cap);
  args.eps = static_cast<float>(eps);
  Tensor out = new_result(qkv, {tokens, args.heads * args.value_dim});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(mlstm)] { kernel(args); }, qkv, gates, pool, slots, starts, lengths, out);
  return out;
}

Tensor gated_rms_norm(Tensor x, Tensor gate, Tensor weight, double eps, int64_t width, bool sigmoid, bool gate_first) {
  GatedNormArgs args{};
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  args.tokens = x.size(0);
  STD_TORCH_CHECK(width > 0 && x.size(1) % width == 0, "width must divide ", x.size(1), ", got ", width);
  args.width = width;
  args.groups = x.size(1) / width;
  args.gate = columns(gate, "gate", args.tokens, x.size(1), x, &args.gate_stride);
  const bool is_own = weight.size(0) != width;
  check_shape(weight, "weight", {is_own ? x.size(1) : width});
  check_contiguous(weight, "weight");
  args.wide_weight = check_norm_weight_dtype(weight, "weight", x);
  args.weight = weight.data_ptr();
  args.weight_stride = is_own ? width : 0;
  args.eps = static_cast<float>(eps);
  args.sigmoid = sigmoid;
  args.gate_first = gate_first;
  Tensor out = new_result(x, x.sizes());
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(gated_rms_norm)] { kernel(args); }, x, gate, weight, out);
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "short_conv_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) tail, Tensor state_slots, Tensor query_start_loc, "
      "Tensor seq_lens, bool silu, Tensor? before, Tensor? after) -> Tensor");
  m.def(
      "gated_delta_rule_(Tensor qkv, Tensor decay, Tensor beta, Tensor rate, Tensor bias, Tensor(a!) pool, "
      "Tensor state_slots, Tensor query_start_loc, Tensor seq_lens, int key_heads, float beta_scale, "
      "float bound, float eps) -> Tensor");
  m.def(
      "state_space_scan_(Tensor xbc, Tensor dt, Tensor rate, Tensor bias, Tensor? skip, Tensor(a!) pool, "
      "Tensor state_slots, Tensor query_start_loc, Tensor seq_lens, int groups, float dt_min, float dt_max) -> Tensor");
  m.def(
      "selective_scan_(Tensor x, Tensor dt, Tensor b, Tensor c, Tensor? gate, Tensor rate, Tensor? bias, Tensor skip, "
      "Tensor(a!) pool, Tensor state_slots, Tensor query_start_loc, Tensor seq_lens) -> Tensor");
  m.def(
      "gated_recurrence_(Tensor x, Tensor input_gate, Tensor kept_gate, Tensor input_bias, Tensor kept_bias, "
      "Tensor rate, Tensor(a!) pool, Tensor state_slots, Tensor query_start_loc, Tensor seq_lens) -> Tensor");
  m.def(
      "wkv_(Tensor key, Tensor value, Tensor gate, Tensor rate, Tensor bonus, Tensor(a!) pool, Tensor state_slots, "
      "Tensor query_start_loc, Tensor seq_lens) -> Tensor");
  m.def(
      "mlstm_(Tensor qkv, Tensor gates, Tensor(a!) pool, Tensor state_slots, Tensor query_start_loc, Tensor seq_lens, "
      "int key_dim, float cap, float eps) -> Tensor");
  m.def(
      "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int width, bool sigmoid, bool gate_first) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("short_conv_", TORCH_BOX(&vllm_cpu::short_conv));
  m.impl("gated_delta_rule_", TORCH_BOX(&vllm_cpu::gated_delta_rule));
  m.impl("state_space_scan_", TORCH_BOX(&vllm_cpu::state_space_scan));
  m.impl("selective_scan_", TORCH_BOX(&vllm_cpu::selective_scan));
  m.impl("gated_recurrence_", TORCH_BOX(&vllm_cpu::gated_recurrence));
  m.impl("wkv_", TORCH_BOX(&vllm_cpu::wkv));
  m.impl("mlstm_", TORCH_BOX(&vllm_cpu::mlstm));
  m.impl("gated_rms_norm", TORCH_BOX(&vllm_cpu::gated_rms_norm));
}
