#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace vllm_cpu {
namespace {

Isa widest_possible() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  Isa widest = Isa::portable;
#ifdef VLLM_HAVE_AVX2
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return widest;
  widest = Isa::avx2;
#endif
#ifdef VLLM_HAVE_AVX512
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) {
    return widest;
  }
  widest = Isa::avx512;
#endif
#ifdef VLLM_HAVE_AVX512_BF16
  if (!(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512vbmi"))) {
    return widest;
  }
  widest = Isa::avx512_bf16;
#endif
#ifdef VLLM_HAVE_AVX512_FP16
#ifndef VLLM_EMULATED
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAvx512Fp16 = 1u << 23;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAvx512Fp16)) return widest;
#endif
  widest = Isa::avx512_fp16;
#endif
  return widest;
#else
  return Isa::portable;
#endif
}

Isa capped(Isa level) {
  static const Isa widest = widest_possible();
  return level < widest ? level : widest;
}

Isa initial() {
  const char* wanted = std::getenv("VLLM_CPU_ISA");
  if (wanted == nullptr) return capped(Isa::avx512_fp16);
  if (std::strcmp(wanted, "portable") == 0) return Isa::portable;
  if (std::strcmp(wanted, "avx2") == 0) return capped(Isa::avx2);
  if (std::strcmp(wanted, "avx512") == 0) return capped(Isa::avx512);
  if (std::strcmp(wanted, "avx512_bf16") == 0) return capped(Isa::avx512_bf16);
  return capped(Isa::avx512_fp16);
}

std::atomic<Isa>& slot() {
  static std::atomic<Isa> isa{initial()};
  return isa;
}

}  // namespace

bool has_bf16_tiles() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (d & kAmxBf16) && (d & kAmxTile);
#else
  return false;
#endif
}

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
