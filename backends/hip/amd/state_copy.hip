// Whole slots of states from one to another, in any number of groups of pools. Launch: state_copy.py.
#include "shim_hip.h"

#define EACH 4  // loads in flight of a thread

// Some bytes of a slot of one pool: their address in slot 0, bytes from slot to slot, how many, the pool's group.
struct Row { u64 address; i64 stride, size, group; };

template <int SIZE> struct alignas(SIZE) Unit { u32 word[SIZE / 4]; };
template <> struct Unit<2> { u16 word; };
template <> struct Unit<1> { u8 word; };

// A block takes a row of the table and walks its group's pairs in order. What one pair writes a later one may read: a
// thread has the same bytes of every slot, so it reads what it wrote itself, and no block waits for another.
KERNEL state_copy(const Row* table, const i64* copies, const int* cu_copies) {
    typedef Unit<UNIT> Each;
    const Row row = table[blockIdx.x];
    const int count = (int)(row.size / UNIT), end = cu_copies[row.group + 1];
    for (int i = cu_copies[row.group]; i < end; ++i) {
        const i64 come = copies[2 * (i64)i], go = copies[2 * (i64)i + 1];
        if (come < 0 || go < 0 || come == go) continue;
        const Each* from = (const Each*)(row.address + come * row.stride);
        Each* to = (Each*)(row.address + go * row.stride);
        for (int first = threadIdx.x; first < count; first += EACH * blockDim.x) {
            Each value[EACH];
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const int at = first + n * blockDim.x;
                value[n] = from[at < count ? at : first];
            }
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const int at = first + n * blockDim.x;
                if (at < count) to[at] = value[n];
            }
        }
    }
}
