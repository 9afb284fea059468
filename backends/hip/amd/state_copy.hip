// Whole slots of states from one to another, in any number of groups of pools. Launch: state_copy.py.
#include "shim_hip.h"

#define EACH 4  // loads in flight of a thread

// Some bytes of a slot of one pool: their address in slot 0, bytes from slot to slot, how many, the pool's group.
struct Row { u64 address; i64 stride, size, group; };

template <int SIZE> struct Unit { typedef u32 Word; };
template <> struct Unit<2> { typedef u16 Word; };
template <> struct Unit<1> { typedef u8 Word; };
typedef Unit<UNIT>::Word Word;
constexpr int WORDS = UNIT / sizeof(Word);
struct alignas(UNIT) Each { Word word[WORDS]; };  // one access

// A block takes a row of the table and walks its group's pairs in order. What one pair writes a later one may read: a
// thread has the same bytes of every slot, so it reads what it wrote itself, and no block waits for another.
KERNEL state_copy(const Row* table, const i64* copies, const int* cu_copies) {
    const Row row = table[blockIdx.x];
    const int count = (int)(row.size / UNIT), end = cu_copies[row.group + 1];
    for (int i = cu_copies[row.group]; i < end; ++i) {
        const i64 come = copies[2 * (i64)i], go = copies[2 * (i64)i + 1];
        if (come < 0 || go < 0 || come == go) continue;
        const Each* from = (const Each*)(row.address + come * row.stride);
        Each* to = (Each*)(row.address + go * row.stride);
        for (int first = threadIdx.x; first < count; first += EACH * blockDim.x) {
            Word value[EACH][WORDS];  // of Each, three of the four would wait in memory on gfx942
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const int at = first + n * blockDim.x;
                const Each read = from[at < count ? at : first];
#pragma unroll
                for (int w = 0; w < WORDS; ++w) value[n][w] = read.word[w];
            }
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const int at = first + n * blockDim.x;
                Each made;
#pragma unroll
                for (int w = 0; w < WORDS; ++w) made.word[w] = value[n][w];
                if (at < count) to[at] = made;
            }
        }
    }
}
