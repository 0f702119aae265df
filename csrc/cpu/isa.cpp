#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vllm_cpu {
namespace {

constexpr Isa next(Isa level) { return static_cast<Isa>(static_cast<int>(level) + 1); }
constexpr Isa below(Isa level) { return static_cast<Isa>(static_cast<int>(level) - 1); }

// Whether the library has the kernels of a level.
constexpr bool is_compiled(Isa level) {
  switch (level) {
#ifdef VLLM_HAVE_PORTABLE
    case Isa::portable:
      return true;
#endif
#ifdef VLLM_HAVE_AVX2
    case Isa::avx2:
      return true;
#endif
#ifdef VLLM_HAVE_AVX512
    case Isa::avx512:
      return true;
#endif
#ifdef VLLM_HAVE_AVX512_VNNI
    case Isa::avx512_vnni:
      return true;
#endif
#ifdef VLLM_HAVE_AVX512_BF16
    case Isa::avx512_bf16:
      return true;
#endif
#ifdef VLLM_HAVE_AVX512_FP16
    case Isa::avx512_fp16:
      return true;
#endif
#ifdef VLLM_HAVE_AMX
    case Isa::amx:
      return true;
#endif
    default:
      return false;
  }
}

#if !defined(VLLM_EMULATED)
// Asks Linux for the memory of this process's tiles, which no process has unasked.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Whether the CPU has the instructions that a level adds to those of the levels below it.
bool cpu_adds(Isa level) {
  if (level == Isa::portable) return true;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  switch (level) {
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::avx512_vnni:
      return __builtin_cpu_supports("avx512vnni");
    case Isa::avx512_bf16:
      return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    default:
      break;
  }
#ifdef VLLM_EMULATED
  return true;
#else
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAvx512Fp16 = 1u << 23, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr unsigned kAmx = kAmxBf16 | kAmxTile | kAmxInt8;
  return level == Isa::amx ? (d & kAmx) == kAmx && may_use_tiles() : (d & kAvx512Fp16) != 0;
#endif
#else
  return false;
#endif
}

Isa widest_that_runs() {
  Isa widest = Isa::portable;
  while (widest < kWidest && cpu_adds(next(widest))) widest = next(widest);
  return widest;
}

// The widest level that was compiled and runs here, up to `level`; else the narrowest.
Isa capped(Isa level) {
  static const Isa widest = widest_that_runs();
  Isa found = level > widest ? widest : level;
  while (found != Isa::none && !is_compiled(found)) found = below(found);
  while (found == Isa::none && level < widest) {
    level = next(level);
    if (is_compiled(level)) found = level;
  }
  return found;
}

Isa initial() {
  const char* wanted = std::getenv("VLLM_CPU_ISA");
  if (wanted == nullptr) return capped(kWidest);
  if (std::strcmp(wanted, "portable") == 0) return capped(Isa::portable);
  if (std::strcmp(wanted, "avx2") == 0) return capped(Isa::avx2);
  if (std::strcmp(wanted, "avx512") == 0) return capped(Isa::avx512);
  if (std::strcmp(wanted, "avx512_vnni") == 0) return capped(Isa::avx512_vnni);
  if (std::strcmp(wanted, "avx512_bf16") == 0) return capped(Isa::avx512_bf16);
  if (std::strcmp(wanted, "avx512_fp16") == 0) return capped(Isa::avx512_fp16);
  return capped(kWidest);
}

std::atomic<Isa>& slot() {
  static std::atomic<Isa> isa{initial()};
  return isa;
}

}  // namespace

bool has_fast_bf16_dot() {
#if defined(VLLM_EMULATED)
  // As on the CPUs that have what is emulated.
  return false;
#elif defined(__x86_64__)
  return current_isa() >= Isa::avx512_bf16 && __builtin_cpu_is("amd");
#else
  return false;
#endif
}

Isa current_isa() { return slot().load(std::memory_order_relaxed); }

Isa set_isa(Isa level) {
  const Isa used = capped(level);
  slot().store(used, std::memory_order_relaxed);
  return used;
}

}  // namespace vllm_cpu
