// The operators that bring weights into their packed order.
#include <algorithm>
#include <cstring>
#include <vector>

#include "background.h"
#include "bindings.h"
#include "huge_pages.h"
#include "kernels.h"

namespace vllm_cpu {
namespace {

constexpr int64_t kPanel = 32;
// A piece has so many codes, or numbers.
constexpr int64_t kPieceValues = 1 << 20;

// uint8 [bytes] for a packed weight.
Tensor new_weight(int64_t bytes) {
  STD_TORCH_CHECK(bytes >= 0, "bytes must not be negative, got ", bytes);
  return WeightMemory::make(bytes, ScalarType::Byte, 1);
}

// From here until finish_packing, what the calling thread packs is not there yet: pack_codes_, pack_numbers_ and
// find_not_finite_ return at once, and `threads` threads do their work. These have the system provide memory for `bytes` of
// weights meanwhile, which takes about as long.
void begin_packing(int64_t threads, int64_t bytes) {
  STD_TORCH_CHECK(Background::current() == nullptr, "packing has begun");
  STD_TORCH_CHECK(threads >= 0 && bytes >= 0, "threads and bytes must not be negative, got ", threads, " and ", bytes);
  constexpr int64_t kPage = WeightMemory::kPage;
  const std::shared_ptr<WeightMemory::Block> block = WeightMemory::begin_reserve(bytes);
  Background::current() = std::make_unique<Background>(threads);
  if (block == nullptr) return;
  Background::current()->add_idle(block->size / kPage, [block](int64_t i) {
    WeightMemory::provide(block->start + i * kPage, kPage);
  });
}

// With `discard` what has not been packed stays so.
void finish_packing(bool discard) {
  if (discard && Background::current() != nullptr) Background::current()->discard();
  Background::current().reset();
  WeightMemory::end_reserve();
}

int64_t panels_per_piece(int64_t numbers_of_row) {
  return std::max<int64_t>(1, kPieceValues / (kPanel * std::max<int64_t>(1, numbers_of_row)));
}

int64_t num_pieces(int64_t panels, int64_t together) { return (panels + together - 1) / together; }

void check_panels(const Tensor& panels, int64_t rows) {
  check_shape(panels, "panels", {(rows + kPanel - 1) / kPanel, -1});
  check_dtype(panels, "panels", ScalarType::Byte, "uint8");
  check_contiguous(panels, "panels");
}

// Where each of the `rows` of all `sources`, numbered through, begins in memory.
std::vector<const char*> addresses_of(const std::vector<Tensor>& sources, const Tensor& rows) {
  std::vector<const char*> starts;
  for (const Tensor& source : sources) {
    const char* first = static_cast<const char*>(source.data_ptr());
    const int64_t stride = source.stride(0) * source.element_size();
    for (int64_t i = 0; i < source.size(0); ++i) starts.push_back(first + i * stride);
  }
  check_shape(rows, "rows", {-1});
  check_dtype(rows, "rows", ScalarType::Long, "int64");
  check_contiguous(rows, "rows");
  const int64_t* numbers = static_cast<const int64_t*>(rows.data_ptr());
  std::vector<const char*> addresses(rows.size(0));
  for (size_t i = 0; i < addresses.size(); ++i) {
    STD_TORCH_CHECK(numbers[i] >= 0 && numbers[i] < static_cast<int64_t>(starts.size()), "rows must be in [0, ",
                    starts.size(), "), got ", numbers[i]);
    addresses[i] = starts[numbers[i]];
  }
  return addresses;
}

void check_field(const BitField& f, const PackCodesArgs& args, int64_t index) {
  const bool one = f.per_byte == 1 && f.width > 0 && f.shift >= 0 && f.shift + f.width <= 8;
  const bool several = f.shift == 0 && f.width * f.per_byte == 8 && f.width <= 4;
  STD_TORCH_CHECK(f.first >= 0 && f.count > 0 && f.first % 8 == 0 && f.count % 8 == 0 &&
                      f.first + f.count <= args.num_codes && (one || several) && f.to >= 0 && f.to + f.width <= 8 &&
                      f.at >= 0 && f.at + f.count / f.per_byte <= args.num_bytes,
                  "layout has a field that does not fit its block: ", index);
}

// Writes the codes of panels [ceil(N / 32), bytes], of `bits` each, whose rows are the `rows` [N] of all `sources`
// [n, bytes of a row], numbered through; `layout` is BlockCodes.numbers, of whose blocks a row has a whole number.
void pack_codes_(Tensor panels, std::vector<Tensor> sources, Tensor rows, Tensor layout, int64_t bits,
                 int64_t flipped) {
  constexpr int64_t kHead = 2, kField = sizeof(BitField) / sizeof(int64_t);
  check_shape(layout, "layout", {-1});
  check_dtype(layout, "layout", ScalarType::Long, "int64");
  check_contiguous(layout, "layout");
  STD_TORCH_CHECK(layout.size(0) > kHead && (layout.size(0) - kHead) % kField == 0, "layout must have whole fields");
  const int64_t* numbers = static_cast<const int64_t*>(layout.data_ptr());
  PackCodesArgs args{};
  args.num_codes = numbers[0];
  args.num_bytes = numbers[1];
  STD_TORCH_CHECK(args.num_codes > 0 && args.num_codes <= kMaxBlockCodes && args.num_codes % 8 == 0,
                  "layout must have 8 to ", kMaxBlockCodes, " codes, in eights, got ", args.num_codes);
  STD_TORCH_CHECK(!sources.empty() && sources[0].dim() == 2 && args.num_bytes > 0 &&
                      sources[0].size(1) % args.num_bytes == 0,
                  "sources must be rows of blocks of ", args.num_bytes, " bytes");
  args.num_blocks = sources[0].size(1) / args.num_bytes;
  args.flipped = static_cast<int>(flipped);
  args.fields = reinterpret_cast<const BitField*>(numbers + kHead);
  args.num_fields = (layout.size(0) - kHead) / kField;
  for (int64_t i = 0; i < args.num_fields; ++i) check_field(args.fields[i], args, i);
  args.rows = rows.dim() == 1 ? rows.size(0) : 0;
  check_panels(panels, args.rows);
  args.bits = bits;
  args.panels = static_cast<uint8_t*>(panels.data_ptr());
  args.panel_bytes = panels.size(1);
  const int64_t inner = args.num_blocks * args.num_codes;
  STD_TORCH_CHECK(args.panel_bytes >= kPanel / 8 * bits * inner, "panels are too small for the codes");
  for (const Tensor& source : sources) {
    check_shape(source, "sources", {-1, sources[0].size(1)});
    check_dtype(source, "sources", ScalarType::Byte, "uint8");
    check_last_contiguous(source, "sources");
  }
  auto addresses = std::make_shared<const std::vector<const char*>>(addresses_of(sources, rows));
  const int64_t together = panels_per_piece(inner);
  const auto piece = [args, panels, sources, layout, addresses, together, kernel = VLLM_KERNEL(pack_codes)](int64_t i) {
    PackCodesArgs own = args;
    const int64_t first = i * together;
    own.addresses = reinterpret_cast<const int64_t*>(addresses->data() + first * kPanel);
    own.panels = args.panels + first * args.panel_bytes;
    own.rows = std::min(args.rows - first * kPanel, together * kPanel);
    kernel(own);
  };
  run_pieces(num_pieces(panels.size(0), together), piece);
}

// Numbers of up to 32 rows, side by side; zeros after the last row.
template <typename T>
void pack_rows(const char* const* addresses, int64_t rows, int64_t count, int64_t stride, char* out) {
  for (int64_t g = 0; g < count; ++g) {
    for (int64_t c = 0; c < kPanel; ++c) {
      T value{};
      if (c < rows) std::memcpy(&value, addresses[c] + g * stride, sizeof(T));
      std::memcpy(out + (g * kPanel + c) * sizeof(T), &value, sizeof(T));
    }
  }
}

// Writes numbers of 1, 2 or 4 bytes into panels [ceil(N / 32), bytes], from the byte `at` of each on: the `rows` [N] of all
// `sources` [n, G], numbered through.
void pack_numbers_(Tensor panels, std::vector<Tensor> sources, Tensor rows, int64_t at) {
  STD_TORCH_CHECK(!sources.empty() && sources[0].dim() == 2, "sources must be matrices");
  const int64_t count = sources[0].size(1), width = sources[0].element_size(), stride = sources[0].stride(1) * width;
  for (const Tensor& source : sources) {
    check_shape(source, "sources", {-1, count});
    STD_TORCH_CHECK(static_cast<int64_t>(source.element_size()) == width && source.stride(1) * width == stride,
                    "sources must have numbers of one size, equally far from each other");
  }
  STD_TORCH_CHECK(width == 1 || width == 2 || width == 4, "numbers must have 1, 2 or 4 bytes, got ", width);
  auto addresses = std::make_shared<const std::vector<const char*>>(addresses_of(sources, rows));
  const int64_t total = rows.size(0);
  check_panels(panels, total);
  STD_TORCH_CHECK(at >= 0 && at + kPanel * count * width <= panels.size(1), "panels are too small for the numbers");
  const int64_t together = panels_per_piece(count);
  const auto pack = width == 1 ? pack_rows<uint8_t> : width == 2 ? pack_rows<uint16_t> : pack_rows<uint32_t>;
  // The sources live as long as their addresses are read.
  const auto piece = [=, sources = std::move(sources)](int64_t i) {
    const int64_t last = std::min((i + 1) * together, panels.size(0));
    for (int64_t panel = i * together; panel < last; ++panel) {
      const int64_t row = panel * kPanel;
      char* out = static_cast<char*>(panels.data_ptr()) + panel * panels.size(1) + at;
      pack(addresses->data() + row, std::min(total - row, kPanel), count, stride, out);
    }
  };
  run_pieces(num_pieces(panels.size(0), together), piece);
}

// Whether all exponent bits of one of `count` numbers are set.
template <typename T, T kExponent>
bool has_not_finite(const char* numbers, int64_t count, int64_t stride) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) {
    T bits;
    std::memcpy(&bits, numbers + i * stride, sizeof(T));
    found |= (bits & kExponent) == kExponent;
  }
  return found;
}

// Sets `found`, uint8 [1], where one of `parts`' numbers [N, G], float32, bfloat16 or float16, is NaN or infinite.
void find_not_finite_(Tensor found, std::vector<Tensor> parts) {
  check_shape(found, "found", {1});
  check_dtype(found, "found", ScalarType::Byte, "uint8");
  for (const Tensor& numbers : parts) {
    check_shape(numbers, "parts", {-1, -1});
    const int64_t rows = numbers.size(0), count = numbers.size(1), width = numbers.element_size();
    const DType dtype = dtype_of(numbers, "parts");
    const auto find = dtype == DType::f32    ? has_not_finite<uint32_t, 0x7f800000>
                      : dtype == DType::bf16 ? has_not_finite<uint16_t, 0x7f80>
                                             : has_not_finite<uint16_t, 0x7c00>;
    const int64_t together = kPanel * panels_per_piece(count);
    run_pieces(num_pieces(rows, together), [=](int64_t i) {
      const int64_t last = std::min((i + 1) * together, rows);
      for (int64_t row = i * together; row < last; ++row) {
        const char* from = static_cast<const char*>(numbers.data_ptr()) + row * numbers.stride(0) * width;
        if (find(from, count, numbers.stride(1) * width)) {
          __atomic_store_n(static_cast<uint8_t*>(found.data_ptr()), 1, __ATOMIC_RELAXED);
        }
      }
    });
  }
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("new_weight(int bytes) -> Tensor");
  m.def("begin_packing(int threads, int bytes) -> ()");
  m.def("finish_packing(bool discard=False) -> ()");
  m.def("pack_codes_(Tensor(a!) panels, Tensor[] sources, Tensor rows, Tensor layout, int bits, int flipped) -> ()");
  m.def("pack_numbers_(Tensor(a!) panels, Tensor[] sources, Tensor rows, int at) -> ()");
  m.def("find_not_finite_(Tensor(a!) found, Tensor[] parts) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("pack_codes_", TORCH_BOX(&vllm_cpu::pack_codes_));
  m.impl("pack_numbers_", TORCH_BOX(&vllm_cpu::pack_numbers_));
  m.impl("find_not_finite_", TORCH_BOX(&vllm_cpu::find_not_finite_));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("new_weight", TORCH_BOX(&vllm_cpu::new_weight));
  m.impl("begin_packing", TORCH_BOX(&vllm_cpu::begin_packing));
  m.impl("finish_packing", TORCH_BOX(&vllm_cpu::finish_packing));
}
