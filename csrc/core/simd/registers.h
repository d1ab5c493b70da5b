/* registers: types, loads and stores of one instruction set, in the compiler's vector
 * extensions.
 *
 * Private to avx2.h, avx512.h and neon.h, which define MLS_TARGET and WIDTH and then
 * include this file. A file of kernels includes exactly one of these three.
 */
#ifndef MLS_SIMD_REGISTERS_H
#define MLS_SIMD_REGISTERS_H

#include "simd/inlined_loops.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(WIDTH)));
typedef double doubles __attribute__((vector_size(WIDTH)));
typedef uint32_t words __attribute__((vector_size(WIDTH)));
enum { FLOATS = WIDTH / 4, DOUBLES = WIDTH / 8 };

/* Loads or stores a register full of floats or doubles, at any address. */
MLS_INLINED floats floats_f32(const unsigned char *items)
{
    floats values;
    memcpy(&values, items, sizeof values);
    return values;
}

MLS_INLINED void store_f32(unsigned char *items, floats values)
{
    memcpy(items, &values, sizeof values);
}

MLS_INLINED doubles doubles_f64(const unsigned char *items)
{
    doubles values;
    memcpy(&values, items, sizeof values);
    return values;
}

MLS_INLINED void store_f64(unsigned char *items, doubles values)
{
    memcpy(items, &values, sizeof values);
}

/* Returns a register with one number in all lanes; the difference keeps a negative
 * zero. */
MLS_INLINED floats repeat(float value)
{
    return value - (floats){0};
}

MLS_INLINED doubles repeat_f64(double value)
{
    return value - (doubles){0};
}

/* Return the items of a register full of bfloat16 at even positions (odd_bf16: odd ones),
 * as floats: a bfloat16 is the upper half of a float. */
MLS_INLINED floats even_bf16(floats pairs)
{
    return (floats)((words)pairs << 16);
}

MLS_INLINED floats odd_bf16(floats pairs)
{
    return (floats)((words)pairs & 0xFFFF0000U);
}

#endif
