import CMLState
import CoreML

/// How a cache changes its length.
enum Move {
    /// The target is at least as long as the source; other positions become `pad`.
    case expand(pad: Double)
    /// The target may be shorter if the tokens fit.
    case compact
}

/// Copy the first `position` positions along an axis from one array to another of the same
/// shape except for this axis. The arrays do not share memory.
func move(
    from source: MLMultiArray, to target: MLMultiArray, position: Int, axis: Int, _ move: Move
) throws {
    let from = try ArrayLayout(source)
    let targetLength = Int64(truncating: target.shape[axis])
    try source.withUnsafeBytes { sourceBytes in
        try from.check(bytes: sourceBytes.count)
        try target.withUnsafeMutableBytes { targetBytes, strides in
            let to = try ArrayLayout(target, strides: strides)
            try to.check(bytes: targetBytes.count)
            let code: Int32
            switch move {
            case .expand(let pad):
                code = mlstate_kv_expand(
                    sourceBytes.baseAddress, from.dtype, from.strides, targetBytes.baseAddress,
                    to.dtype, to.strides, from.shape, from.rank, Int32(axis), targetLength,
                    Int64(position), pad)
            case .compact:
                code = mlstate_kv_compact(
                    sourceBytes.baseAddress, from.dtype, from.strides, targetBytes.baseAddress,
                    to.dtype, to.strides, from.shape, from.rank, Int32(axis), targetLength,
                    Int64(position))
            }
            try KVError.check(code)
        }
    }
}

/// Move a KV cache to a longer sequence: copy the tokens, pad the other positions.
///
/// - Parameters:
///   - sourceState: `[layers, heads, sequence, head_dim]`, or 2 to 8 axes with `seqAxis`.
///   - targetSeqLength: positions of the result, at least those of the source.
///   - currentPosition: number of tokens in the cache; later positions are dropped. `nil`: all
///     positions have a token.
///   - padValue: value of positions without a token.
///   - seqAxis: axis of the sequence; a negative number counts from the last axis.
/// - Returns: a new array with the source's data type.
/// - Throws: `KVError`, for example if the target is shorter than the source.
public func transitionKVState(
    sourceState: MLMultiArray,
    targetSeqLength: Int,
    currentPosition: Int? = nil,
    padValue: Double = 0,
    seqAxis: Int = -2
) throws -> MLMultiArray {
    let axis = try ArrayLayout(sourceState).axis(seqAxis)
    let length = sourceState.shape[axis].intValue
    let position = currentPosition ?? length
    guard targetSeqLength >= length, (0...length).contains(position) else {
        throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_CAPACITY))
    }
    let target = try makeArray(like: sourceState, length: targetSeqLength, axis: axis)
    try move(
        from: sourceState, to: target, position: position, axis: axis, .expand(pad: padValue))
    return target
}

/// Move a KV cache to a shorter sequence that can hold its tokens; other positions become 0.
///
/// - Parameters:
///   - sourceState: `[layers, heads, sequence, head_dim]`, or 2 to 8 axes with `seqAxis`.
///   - targetSeqLength: positions of the result, at least `currentPosition` and at least 1.
///   - currentPosition: number of tokens in the cache.
///   - seqAxis: axis of the sequence; a negative number counts from the last axis.
/// - Returns: a new array with the source's data type.
/// - Throws: `KVError`, for example if the tokens do not fit.
public func compactKVState(
    sourceState: MLMultiArray,
    targetSeqLength: Int,
    currentPosition: Int,
    seqAxis: Int = -2
) throws -> MLMultiArray {
    let axis = try ArrayLayout(sourceState).axis(seqAxis)
    let most = min(targetSeqLength, sourceState.shape[axis].intValue)
    guard targetSeqLength > 0, currentPosition >= 0, currentPosition <= most else {
        throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_CAPACITY))
    }
    let target = try makeArray(like: sourceState, length: targetSeqLength, axis: axis)
    try move(
        from: sourceState, to: target, position: currentPosition, axis: axis, .compact)
    return target
}
