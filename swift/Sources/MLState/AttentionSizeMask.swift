import CMLState
import CoreML

/// Create the mask that limits attention to a number of earlier tokens.
///
/// Row `i` is 0 at columns `max(0, i - attentionSize) … i`, and at the first `sinks` columns up
/// to `i`. It is `fill` elsewhere.
///
/// - Parameters:
///   - seqLength: columns, and rows unless `rows` is given; at least 1.
///   - attentionSize: earlier tokens that each token attends to, in addition to itself.
///   - sinks: first tokens that every later token attends to as well.
///   - rows: rows to create, such as `position..<position + 1` for one token. Not empty.
///   - dataType: `.float16`, `.float32` or `.double`.
///   - fill: minus infinity, or a finite minimum such as -65504 for hardware that turns
///     infinities into NaN.
/// - Returns: an array of shape `[1, 1, rows, seqLength]`.
/// - Throws: `KVError`.
public func attentionSizeMask(
    seqLength: Int,
    attentionSize: Int,
    sinks: Int = 0,
    rows: Range<Int>? = nil,
    dataType: MLMultiArrayDataType = .float16,
    fill: Double = -.infinity
) throws -> MLMultiArray {
    guard seqLength > 0 else {
        throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_CAPACITY))
    }
    let rows = rows ?? 0..<seqLength
    guard !rows.isEmpty, rows.lowerBound >= 0, rows.upperBound <= seqLength else {
        throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_CAPACITY))
    }
    let shape = [1, 1, rows.count, seqLength].map { NSNumber(value: $0) }
    let mask = try MLMultiArray(shape: shape, dataType: dataType)
    try mask.withUnsafeMutableBytes { bytes, strides in
        let layout = try ArrayLayout(mask, strides: strides)
        try layout.check(bytes: bytes.count)
        guard layout.strides[3] == 1 else {
            throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_SHAPE))
        }
        try KVError.check(
            mlstate_kv_mask(
                bytes.baseAddress, layout.dtype, layout.strides[2], Int64(seqLength),
                Int64(attentionSize), Int64(sinks), Int64(rows.lowerBound),
                Int64(rows.upperBound), fill))
    }
    return mask
}
