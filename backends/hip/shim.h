// What differs between the two vendors' C++, and the number formats, in plain arithmetic: the headers for fp16, bf16
// and fp8 come with toolkits, which a user's machine may not have.
#pragma once

#if !defined(__CUDACC_RTC__) && !defined(__HIPCC_RTC__)  // both have it built in
#include <cuda_runtime.h>
#endif

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define SHUFFLE_XOR(value, lanes) __shfl_xor(value, lanes)
#define SHUFFLE(value, lane, width) __shfl(value, lane, width)
#define ANY(condition) __any(condition)
#define HALF_TO_FLOAT(bits) ((float)__builtin_bit_cast(_Float16, bits))
#define FLOAT_TO_HALF(x) __builtin_bit_cast(unsigned short, (_Float16)(x))
#define BRANCH_APART() __builtin_amdgcn_sched_barrier(0)  // no instruction
#define TRAP() __builtin_trap()
#else
#define SHUFFLE_XOR(value, lanes) __shfl_xor_sync(~0u, value, lanes)
#define SHUFFLE(value, lane, width) __shfl_sync(~0u, value, lane, width)
#define ANY(condition) __any_sync(~0u, condition)
extern "C" __device__ float __nv_half2float(unsigned short);  // of libdevice, which every compiler brings: one
extern "C" __device__ unsigned short __nv_float2half_rn(float);  // instruction each
#define HALF_TO_FLOAT(bits) __nv_half2float(bits)
#define FLOAT_TO_HALF(x) __nv_float2half_rn(x)
#define BRANCH_APART()
#define TRAP() __trap()
#endif
#ifdef CHECKED  // a debug build: launch.py, `checks`
#define CHECK(condition) if (!(condition)) TRAP()
#else
#define CHECK(condition)
#endif
#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;  // of every offset into a pool: 65,536 pages of 32 KiB are past 2**31

// Whether this block is the last of so many that come here, and so sees what all of them wrote before; `count` is ready
// for the next ones then. On an H100 the atomic takes 0.3 us less than two fences.
DEVICE bool arrive(u32* at, u32 count, int* last) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ >= 13
    __syncthreads();
    if (threadIdx.x == 0) *last = __nv_atomic_fetch_add(at, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE) == count - 1;
    __syncthreads();
#else
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *last = atomicAdd(at, 1u) == count - 1;
    __syncthreads();
    if (*last) __threadfence();
#endif
    if (threadIdx.x == 0 && *last) *at = 0;
    return *last;
}

constexpr int FEWEST_LANES = 4 * 8;  // of a wave, of all devices

// A divisor of numbers below 2**31, of which n / divisor is the upper half of 2 n magic, shifted: launch.py, `divide`.
struct Divide {
    int divisor;
    u32 magic;
    int shift;

    __device__ __forceinline__ int of(int n) const { return (int)(__umulhi(2u * n, magic) >> shift); }
};

// A binary format of 8 bits. Values beyond the largest become infinite, or that largest where it SATURATES.
// "fnuz" has no -0, whose code is its NaN. A code of 0 for INFINITY: the format has none.
template <typename Bits, int MANTISSA, int BIAS, u32 LARGEST, u32 INFINITY_CODE, u32 NAN_CODE, bool SATURATES>
struct Format {
    Bits bits;
    static constexpr u32 SIGN = 1u << (8 * sizeof(Bits) - 1);
    static constexpr bool FNUZ = NAN_CODE == SIGN;
    static constexpr u32 MOST = SATURATES ? LARGEST : INFINITY_CODE;

    // Exact: the exponent as float32 reads it is 127 - BIAS too small, and float32's own subnormals stand for these.
    DEVICE float decode(Format x) {
        const u32 size = x.bits & (SIGN - 1);
        float value = __uint_as_float(size << (23 - MANTISSA)) * __uint_as_float((254u - BIAS) << 23);
        if (FNUZ ? x.bits == SIGN : size > LARGEST) value = __uint_as_float(0x7fc00000);
        if (INFINITY_CODE && size == INFINITY_CODE) value = __uint_as_float(0x7f800000);
        return x.bits & SIGN ? -value : value;
    }

    // To the nearest, ties to even.
    DEVICE Format encode(float x) {
        const u32 bits = __float_as_uint(x), size = bits & 0x7fffffff;
        constexpr int drop = 23 - MANTISSA;
        constexpr u32 rebias = (127u - BIAS) << MANTISSA;
        const u32 normal = ((size + ((size >> drop) & 1) + ((1u << (drop - 1)) - 1)) >> drop) - rebias;
        // below the least normal number, values are multiples of 2**(1 - BIAS - MANTISSA): adding 2**23 rounds to one
        const float steps = __uint_as_float(size) * __uint_as_float((126u + BIAS + MANTISSA) << 23) + 8388608.0f;
        const u32 subnormal = __float_as_uint(steps) & (SIGN - 1);
        u32 code = size < (128u - BIAS) << 23 ? subnormal : normal;
        if (code > MOST) code = MOST;
        if (size > 0x7f800000) return {(Bits)NAN_CODE};
        if (FNUZ && !code) return {(Bits)0};
        return {(Bits)(code | (bits >> 31 ? SIGN : 0))};
    }
};
typedef Format<u8, 3, 7, 0x7e, 0, 0x7f, true> e4m3fn;
typedef Format<u8, 3, 8, 0x7f, 0, 0x80, true> e4m3fnuz;
typedef Format<u8, 2, 15, 0x7b, 0x7c, 0x7f, true> e5m2;
typedef Format<u8, 2, 16, 0x7f, 0, 0x80, true> e5m2fnuz;
struct fp16 { u16 bits; };
struct bf16 { u16 bits; };

template <typename T> struct Bits {
    DEVICE T from(u32 bits) { return {(decltype(T::bits))bits}; }
    DEVICE u32 of(T x) { return x.bits; }
};
template <> struct Bits<float> {
    DEVICE float from(u32 bits) { return __uint_as_float(bits); }
    DEVICE u32 of(float x) { return __float_as_uint(x); }
};

template <typename T> DEVICE float to_float(T x) { return T::decode(x); }
template <> __device__ __forceinline__ float to_float(float x) { return x; }
template <> __device__ __forceinline__ float to_float(fp16 x) { return HALF_TO_FLOAT(x.bits); }
template <> __device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> struct From {
    DEVICE T value(float x) { return T::encode(x); }
};
template <> struct From<float> {
    DEVICE float value(float x) { return x; }
};
template <> struct From<fp16> {
    static constexpr int BIAS = 15;
    DEVICE fp16 value(float x) { return {FLOAT_TO_HALF(x)}; }
};
template <> struct From<bf16> {
    static constexpr int BIAS = 127;
    DEVICE bf16 value(float x) {
        const u32 bits = __float_as_uint(x);
        if ((bits & 0x7fffffff) > 0x7f800000) return {(u16)(bits >> 16 | 0x40)};
        return {(u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};

// COUNT elements of a row as words, so that they stay in registers whatever is done with one of them. Read and written
// as one vector where `whole`, else element by element, `step` apart, the first `count` of them. Of words, clang would
// make the last element's access of both branches one, and 4 and 12 bytes of the vector's.
template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Few {
    u32 word[sizeof(T) * COUNT / 4];

    __device__ __forceinline__ T get(int i) const {
        return Bits<T>::from(word[i * sizeof(T) / 4] >> 8 * (i * sizeof(T) % 4));
    }
    __device__ __forceinline__ void set(int i, T x) {
        word[i * sizeof(T) / 4] |= Bits<T>::of(x) << 8 * (i * sizeof(T) % 4);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32& each : word) each = 0;
    }
};

template <typename T, int COUNT, typename Step>
DEVICE Few<T, COUNT> read(const T* from, bool whole, int count, Step step) {
    Few<T, COUNT> few;
    if (whole) {
        few = *(const Few<T, COUNT>*)from;
        if (sizeof(T) == 4) BRANCH_APART();
        return few;
    }
    few.clear();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < count) few.set(i, from[step(i)]);
    return few;
}

template <typename T, int COUNT, typename Step>
DEVICE void write(T* to, Few<T, COUNT> few, bool whole, int count, Step step) {
    if (whole) {
        *(Few<T, COUNT>*)to = few;
        if (sizeof(T) == 4) BRANCH_APART();
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < count) to[step(i)] = few.get(i);
}

DEVICE i64 next(int i) { return i; }

template <int COUNT, typename T> DEVICE bool aligned(const T* at) { return (u64)at % (sizeof(T) * COUNT) == 0; }

// `change`d in float32 where the type changes, else the same bits.
template <typename T, typename S, typename Change> struct Convert {
    DEVICE T value(S x, Change change) { return From<T>::value(change(to_float(x))); }
};
template <typename T, typename Change> struct Convert<T, T, Change> {
    DEVICE T value(T x, Change) { return x; }
};
template <typename T, typename S, typename Change> DEVICE T convert(S x, Change change) {
    return Convert<T, S, Change>::value(x, change);
}

// What a thread works on, or first on: 16 bytes of a (token, head).
struct Item { int token, head, column; };

// A token's (head, chunk of 16 bytes) pairs are spread over the threads of a block, and of gridDim.z blocks where there
// are more pairs; where there are fewer, a block takes several tokens. launch.py, `items`.
struct Items {
    Divide pairs, chunks;  // of a token, of a head
    int tokens, count;  // tokens of a block; elements of a chunk

    __device__ __forceinline__ bool find(Item* item, int end) const {
        const int nth = pairs.of(threadIdx.x), pair = threadIdx.x - nth * pairs.divisor + blockIdx.z * blockDim.x;
        item->token = blockIdx.x * tokens + nth;
        item->head = chunks.of(pair);
        item->column = (pair - item->head * chunks.divisor) * count;
        return nth < tokens && pair < pairs.divisor && item->token < end;
    }
};
