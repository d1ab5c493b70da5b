/* mlstate/kv.h: KV caches of language models in C: move to another length, mask, rotate,
 * quantize.
 *
 * Arrays are plain pointers with a shape, strides and a dtype code.
 * - `shape` has `rank` lengths; no array has more than 8 axes.
 * - `strides` are in elements, as in DLPack and MLMultiArray, and may be negative. NULL
 *   means packed in C order. The pointer is the element at index 0, 0, ...
 * - Items have this machine's byte order. They need no alignment.
 * - `seq_axis` is the sequence; a negative number counts from the last axis.
 *
 * Every function that returns int returns MLSTATE_KV_OK (0) or one of the errors below,
 * and writes nothing if it returns an error. The only exception is a value that cannot be
 * quantized: see mlstate_kv_quantize. If several errors hold, any of them is returned.
 * A function reads and writes the elements of its
 * arrays and nothing else: bytes between strided elements keep their content. The caller
 * owns all memory, which must have the size that shape and strides need.
 *
 * Functions allocate nothing, start no thread and keep no state. So threads may call them
 * at the same time, for separate targets. The Python package mlstate computes the same
 * results bit by bit, on every instruction set; rotations use the sine and cosine of the
 * C library.
 *
 * Versions: an unchanged major version keeps every function, number and meaning.
 * 1.1: codes of 2, 3, 5 and 6 bits, mlstate_kv_quantize_move, mlstate_kv_dequantize_move.
 */
#ifndef MLSTATE_KV_H
#define MLSTATE_KV_H

#include <stddef.h>
#include <stdint.h>

#define MLSTATE_KV_VERSION_MAJOR 1
#define MLSTATE_KV_VERSION_MINOR 1
/* Major times 1000 plus minor. */
#define MLSTATE_KV_VERSION       (MLSTATE_KV_VERSION_MAJOR * 1000 + MLSTATE_KV_VERSION_MINOR)

#ifndef MLSTATE_KV_API
#    if defined(__GNUC__)
#        define MLSTATE_KV_API __attribute__((visibility("default")))
#    else
#        define MLSTATE_KV_API
#    endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Results of functions. */
enum {
    MLSTATE_KV_OK = 0,
    MLSTATE_KV_ERROR_NULL = 1,     /* a pointer is NULL that must not be */
    MLSTATE_KV_ERROR_VALUE = 2,    /* a number is outside its range */
    MLSTATE_KV_ERROR_SHAPE = 3,    /* rank, axis, or the lengths of axes */
    MLSTATE_KV_ERROR_DTYPE = 4,    /* an unknown dtype, or one that does not fit */
    MLSTATE_KV_ERROR_CAPACITY = 5, /* the tokens do not fit, or a position is outside */
    MLSTATE_KV_ERROR_OVERLAP = 6,  /* arrays share memory, or elements of a target do */
    MLSTATE_KV_ERROR_SIZE = 7      /* the array exceeds the address space */
};

/* Dtypes. */
enum {
    MLSTATE_KV_FLOAT16 = 1,
    MLSTATE_KV_BFLOAT16 = 2,
    MLSTATE_KV_FLOAT32 = 3,
    MLSTATE_KV_FLOAT64 = 4,
    MLSTATE_KV_INT8 = 5,
    MLSTATE_KV_INT16 = 6,
    MLSTATE_KV_INT32 = 7,
    MLSTATE_KV_INT64 = 8,
    MLSTATE_KV_UINT8 = 9,
    MLSTATE_KV_UINT16 = 10,
    MLSTATE_KV_UINT32 = 11,
    MLSTATE_KV_UINT64 = 12,
    MLSTATE_KV_BOOL = 13,
    MLSTATE_KV_FLOAT8_E4M3FN = 14,
    MLSTATE_KV_FLOAT8_E5M2 = 15
};

/* Return MLSTATE_KV_VERSION of the compiled library. */
MLSTATE_KV_API int mlstate_kv_version(void);

/* Return a constant English text for the result `code` of a function, also for an unknown
 * number; never NULL. */
MLSTATE_KV_API const char *mlstate_kv_error_text(int code);

/* Return the bytes of an element, or 0 for an unknown dtype. */
MLSTATE_KV_API size_t mlstate_kv_dtype_bytes(int dtype);

/* Move a cache to at least as many positions: copy the first `position` positions of the
 * sequence from `source` to `target`, and set all others of `target` to `pad`.
 *
 * `shape` has the `rank` lengths of the source. The target has the same, except that its
 * sequence has `target_length` positions. Floats of 16, 32 and 64 bits convert into one
 * another, rounded to nearest even; any other dtype must be the same on both sides. A
 * cache has 2 to 8 axes. ERROR_CAPACITY: the target is shorter than the source, or
 * `position` is outside 0..length. ERROR_OVERLAP: source and target share memory.
 * ERROR_VALUE: the dtype cannot hold `pad`; 8-bit floats take only 0. */
MLSTATE_KV_API int mlstate_kv_expand(const void *source, int source_dtype,
                                     const int64_t *source_strides, void *target,
                                     int target_dtype, const int64_t *target_strides,
                                     const int64_t *shape, int rank, int seq_axis,
                                     int64_t target_length, int64_t position, double pad);

/* As mlstate_kv_expand, but the target may be shorter than the source if `position`
 * positions fit, and all others are set to 0. ERROR_CAPACITY: `position` exceeds the
 * source's or the target's length. */
MLSTATE_KV_API int mlstate_kv_compact(const void *source, int source_dtype,
                                      const int64_t *source_strides, void *target,
                                      int target_dtype, const int64_t *target_strides,
                                      const int64_t *shape, int rank, int seq_axis,
                                      int64_t target_length, int64_t position);

/* Write rows first_row .. end_row - 1 of an attention mask of `seq_length` columns to
 * `mask`, the address of the first of these rows.
 *
 * Row i is 0 at columns max(0, i - attention_size) .. i and at the first `sinks` columns
 * up to i; it is `fill` elsewhere. The mask is a float of 16, 32 or 64 bits; its rows are
 * `row_stride` elements apart and their columns adjacent.
 * ERROR_CAPACITY: a number is negative, or the rows are not in 0..seq_length.
 * ERROR_OVERLAP: rows share memory. ERROR_VALUE: the dtype cannot hold `fill`. */
MLSTATE_KV_API int mlstate_kv_mask(void *mask, int dtype, int64_t row_stride,
                                   int64_t seq_length, int64_t attention_size,
                                   int64_t sinks, int64_t first_row, int64_t end_row,
                                   double fill);

/* Move keys with rotary position embeddings to other positions: turn pair i of each key
 * by the angle shift * base**(-2 * i / rotary_dim) / scaling, in radians, and write the
 * result to `target`.
 *
 * The last axis is the head dimension. Its first `rotary_dim` elements turn, or all if it
 * is 0; the others are copied. Pair i is elements 2i and 2i + 1 if `interleaved` is not
 * 0, else i and i + rotary_dim / 2. `shifts` has one entry for each position, or one for
 * all (`shift_count` 1). Target and keys are floats of 16, 32 or 64 bits, of one dtype.
 * The target may be the keys themselves.
 * ERROR_VALUE: base or scaling is not finite and positive, or the number of elements to
 * turn is not an even one of 2..4096, or exceeds the head dimension. ERROR_SHAPE: the
 * sequence is the last axis, or the number of shifts is another. ERROR_OVERLAP: the
 * target shares memory with the shifts or with the keys, but is not the same view. */
MLSTATE_KV_API int mlstate_kv_rotate(const void *keys, const int64_t *keys_strides,
                                     void *target, const int64_t *target_strides,
                                     int dtype, const int64_t *shape, int rank,
                                     int seq_axis, const int64_t *shifts,
                                     int64_t shift_count, double base, double scaling,
                                     int64_t rotary_dim, int interleaved);

/* Compute the lengths of the last axis of codes (`*words`, in 32-bit words) and of scales
 * and biases (`*groups`), for values whose last axis has `length` elements. ERROR_VALUE:
 * bits are not 2, 3, 4, 5, 6 or 8, or `group` is not a multiple of 32 up to 4096 (of 8
 * for 4 and 8 bits). ERROR_SHAPE: the group does not divide the length, or the length is
 * negative. */
MLSTATE_KV_API int mlstate_kv_quantized_lengths(int64_t length, int bits, int64_t group,
                                                int64_t *words, int64_t *groups);

/* Quantize groups of `group` adjacent elements of the last axis to codes of 2, 3, 4, 5, 6
 * or 8 bits: a value is about scale * code + bias. The codes of the last axis are one
 * string of bits in words, the first code in the lowest bits; codes of 3, 5 and 6 bits
 * cross the ends of words. Scales and biases have the dtype of the values. All three are
 * packed in C order and have the shape of the values, except for the last axis: see
 * mlstate_kv_quantized_lengths. mlx.core.quantize stores the same bits.
 *
 * Values are float16, bfloat16 or float32, with 1 to 8 axes.
 * ERROR_OVERLAP: two of the four arrays share memory. ERROR_VALUE, besides bits and
 * group: a value is not finite, or the values of a group are too far apart; codes, scales
 * and biases are then undefined. */
MLSTATE_KV_API int mlstate_kv_quantize(const void *values, int dtype,
                                       const int64_t *strides, const int64_t *shape,
                                       int rank, int bits, int64_t group, uint32_t *codes,
                                       void *scales, void *biases);

/* Write scale * code + bias of each code, computed in float and rounded once, to
 * `values`, which has `shape` and `strides`. Arguments and errors: see
 * mlstate_kv_quantize. */
MLSTATE_KV_API int mlstate_kv_dequantize(void *values, int dtype, const int64_t *strides,
                                         const int64_t *shape, int rank, int bits,
                                         int64_t group, const uint32_t *codes,
                                         const void *scales, const void *biases);

/* Move a cache to another length and quantize its first `position` tokens on the way, in
 * one pass: write the bits that mlstate_kv_quantize writes for the result of
 * mlstate_kv_compact, but set codes, scales and biases of positions without a token to 0.
 *
 * `values` is the source of the given shape, with 2 to 8 axes; codes, scales and biases
 * have `target_length` positions. Errors as for mlstate_kv_quantize, and
 * ERROR_CAPACITY: `position` exceeds either length. ERROR_SHAPE: the sequence is the last
 * axis. */
MLSTATE_KV_API int mlstate_kv_quantize_move(const void *values, int dtype,
                                            const int64_t *strides, const int64_t *shape,
                                            int rank, int seq_axis, int64_t target_length,
                                            int64_t position, int bits, int64_t group,
                                            uint32_t *codes, void *scales, void *biases);

/* The reverse of mlstate_kv_quantize_move, with its errors: codes, scales and biases are
 * the source, packed for values of `shape`; `values` is the target with `target_length`
 * positions. Values of positions from `position` on become 0. */
MLSTATE_KV_API int mlstate_kv_dequantize_move(
    void *values, int dtype, const int64_t *strides, const int64_t *shape, int rank,
    int seq_axis, int64_t target_length, int64_t position, int bits, int64_t group,
    const uint32_t *codes, const void *scales, const void *biases);

#ifdef __cplusplus
}
#endif

#endif
