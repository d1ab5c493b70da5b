/* tensors: packed views, and their elements as numbers. */
#ifndef MLS_TEST_TENSORS_H
#define MLS_TEST_TENSORS_H

#include "array/float_convert.h"
#include "array/tensor.h"
#include "support/runner.h"

#include <string.h>

static inline mls_tensor tensor_of(void *data, mls_dtype dtype, int rank,
                                   const size_t *shape)
{
    mls_tensor view = {0};
    mls_status st;
    CHECK(mls_tensor_init(&view, data, dtype, rank, shape, &st) == MLS_OK);
    return view;
}

static inline mls_tensor vector_of(void *data, mls_dtype dtype, size_t count)
{
    return tensor_of(data, dtype, 1, &count);
}

static inline mls_tensor matrix_of(void *data, mls_dtype dtype, size_t rows,
                                   size_t columns)
{
    return tensor_of(data, dtype, 2, (const size_t[]){rows, columns});
}

/* A row-major matrix as a view of memory that stores it column by column. */
static inline mls_tensor transposed_of(void *data, mls_dtype dtype, size_t rows,
                                       size_t columns)
{
    mls_tensor view = matrix_of(data, dtype, rows, columns);
    view.strides[0] = view.strides[1];
    view.strides[1] *= (ptrdiff_t)rows;
    return view;
}

/* The number at an address; `dtype` is one of the floats of 16 to 64 bits. */
static inline double read_float(mls_dtype dtype, const void *at)
{
    uint16_t half;
    float single;
    double wide;
    if (dtype == MLS_F64) {
        memcpy(&wide, at, sizeof wide);
        return wide;
    }
    if (dtype == MLS_F32) {
        memcpy(&single, at, sizeof single);
        return (double)single;
    }
    memcpy(&half, at, sizeof half);
    return (double)(dtype == MLS_F16 ? mls_f32_from_f16(half) : mls_f32_from_bf16(half));
}

static inline void write_float(mls_dtype dtype, void *at, float value)
{
    const double wide = (double)value;
    const uint16_t half =
        dtype == MLS_F16 ? mls_f16_from_f32(value) : mls_bf16_from_f32(value);
    const void *from = dtype == MLS_F64   ? (const void *)&wide
                       : dtype == MLS_F32 ? (const void *)&value
                                          : (const void *)&half;
    memcpy(at, from, mls_dtype_of(dtype)->item_bytes);
}

#endif
