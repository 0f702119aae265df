// Products with a quantised weight in matrix tiles, for one tile of rows with codes that are widened as they are multiplied,
// for more with a panel that is widened once for all; the same numbers are summed in the same order.
//
// Include only from kernels/*.cpp.
#pragma once

#include "quantized_panels.h"
#include "tile_groups.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// How a group's units fall into steps of up to 32 k. The last step's are filled up with zeros.
struct UnitSteps {
  static constexpr int64_t kUnits = kTileInner / kUnit;
  int64_t units, of_group, count;
  explicit UnitSteps(const Quantized& q)
      : units(least(units_of_group(q), kUnits)),
        of_group((units_of_group(q) + units - 1) / units),
        count(of_group * q.groups) {}
};

using WidenUnits = void (*)(const LinearArgs&, const uint8_t* codes, int64_t units, uint8_t* to);

// Such products share this. Form: the dtype that codes are widened to, right tiles' rows one behind the other.
//
//   Products            what is multiplied
//   kUnitBytes          of a widened unit
//   widener(args)       what widens units
template <typename Form>
struct CodesInTiles {
  static constexpr int kMaxRows = 2 * kTileRows;
  static constexpr int panels_at_once(int) { return 1; }

  static int64_t panel_size(const LinearArgs& a) { return a.quant.at.size; }

  // Rows pass by all of them: the more these are, the less often rows come from memory.
  static int64_t panels_at_a_time(const LinearArgs& a) {
    constexpr int64_t kLeast = 2, kMost = 16, kBytes = 1024 * 1024;
    if (!is_widened_once(a)) return kLeast;
    const int64_t panels = kBytes / (Prepared::size(a) * static_cast<int64_t>(sizeof(float)));
    return panels < kLeast ? kLeast : least(panels, kMost);
  }

  static int64_t prepared_size(const LinearArgs& a) { return panels_at_a_time(a) * Prepared::size(a); }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    for (; panel < stop; ++panel) {
      const Prepared to(a, panel);
      widen_scales(a.quant, panel_of(a, panel), to.scales, to.offsets);
      if (!is_widened_once(a)) continue;
      Widener widener(a, panel);
      uint8_t* at = to.codes;
      for (int64_t step = widener.steps.count; step > 0; --step, at += widener.bytes()) widener.widen(at);
    }
  }

  static void finish() { row_tiles().release(); }

 protected:
  static bool is_widened_once(const LinearArgs& a) { return a.rows > kMaxRows; }
  static const uint8_t* panel_of(const LinearArgs& a, int64_t panel) {
    return static_cast<const uint8_t*>(a.weight) + panel * a.quant.at.size;
  }

  // A prepared panel: scales [groups][32], offsets [groups][32], and widened codes.
  struct Prepared {
    float *scales, *offsets;
    uint8_t* codes;
    Prepared(const LinearArgs& a, int64_t panel) {
      scales = a.prepared + panel % panels_at_a_time(a) * size(a);
      offsets = scales + a.quant.groups * kPanel;
      codes = reinterpret_cast<uint8_t*>(offsets + a.quant.groups * kPanel);
    }
    static int64_t size(const LinearArgs& a) {
      const UnitSteps steps(a.quant);
      return 2 * kPanel * a.quant.groups + (is_widened_once(a) ? steps.count * steps.units * Form::kUnitBytes / 4 : 0);
    }
  };

  // Calls add(group, count, sums) as multiply_groups does, of rows' steps [steps][rows][bytes] times a panel.
  template <typename Add>
  static void multiply_panel(const LinearArgs& a, const void* x, int rows, int64_t bytes, int64_t of_group, int64_t panel,
                             AheadOfTiles ahead, const Add& add) {
    const TileRows tiles{x, rows, bytes, UnitSteps(a.quant).count, of_group};
    if (is_widened_once(a)) {
      const uint8_t* at = Prepared(a, panel).codes;
      const int64_t step_bytes = UnitSteps(a.quant).units * Form::kUnitBytes;
      const auto panel_at = [&](int64_t step) VLLM_INLINE {
        ahead(kTileInner / kRun);
        return at + step * step_bytes;
      };
      return multiply_groups<typename Form::Products>(tiles, panel_at, add);
    }
    // The next step's are widened before a tile loads this one's: it need not wait for their stores.
    alignas(64) uint8_t widened[2][UnitSteps::kUnits * Form::kUnitBytes];
    Widener widener(a, panel);
    // Fetches the next panel meanwhile: what the hardware fetches by itself stops at each page.
    const char* next = reinterpret_cast<const char*>(panel_of(a, panel + 1));
    const int64_t share = (panel_size(a) / 64 + tiles.steps - 1) / tiles.steps;
    widener.widen(widened[0]);
    const auto panel_at = [&](int64_t step) VLLM_INLINE {
      for (int64_t i = 0; i < share; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      if (step + 1 < tiles.steps) widener.widen(widened[(step + 1) % 2]);
      return static_cast<const uint8_t*>(widened[step % 2]);
    };
    multiply_groups<typename Form::Products>(tiles, panel_at, add);
  }

 private:
  // Widens a panel's codes step by step.
  struct Widener {
    const LinearArgs& args;
    const UnitSteps steps;
    const WidenUnits widen_units;
    const uint8_t* codes;
    int64_t left;

    Widener(const LinearArgs& a, int64_t panel)
        : args(a), steps(a.quant), widen_units(Form::widener(a)), codes(panel_of(a, panel)), left(units_of_group(a.quant)) {}
    int64_t bytes() const { return steps.units * Form::kUnitBytes; }
    void widen(uint8_t* to) {
      const int64_t units = least(steps.units, left);
      widen_units(args, codes, units, to);
      if (units < steps.units) {
        std::memset(to + units * Form::kUnitBytes, 0, static_cast<size_t>((steps.units - units) * Form::kUnitBytes));
      }
      codes += units * kPanel * args.quant.bits;
      left = left > units ? left - units : units_of_group(args.quant);
    }
  };
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
