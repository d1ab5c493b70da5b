import CMLState
import CoreML

/// Copy a whole array to another one of the same shape, whatever its number of axes.
private func copyAll(from source: MLMultiArray, to target: MLMultiArray) throws {
    try source.withUnsafeBytes { sourceBytes in
        var from = try ArrayLayout(source)
        try from.check(bytes: sourceBytes.count)
        try target.withUnsafeMutableBytes { targetBytes, strides in
            var to = try ArrayLayout(target, strides: strides)
            try to.check(bytes: targetBytes.count)
            if from.shape.count == 1 {  // the C library takes at least two axes
                from.shape.append(1)
                from.strides.append(1)
                to.strides.append(1)
            }
            try KVError.check(
                mlstate_kv_expand(
                    sourceBytes.baseAddress, from.dtype, from.strides, targetBytes.baseAddress,
                    to.dtype, to.strides, from.shape, from.rank, 0, from.shape[0], from.shape[0],
                    0))
        }
    }
}

/// Move a state between the buffers of two models, without a copy in between.
private func moveState(
    from source: MLState, to target: MLState, name: String, position: Int, seqAxis: Int,
    _ kind: Move
) throws {
    guard source !== target else {
        throw KVError.sameState
    }
    // Core ML may move a buffer between calls, so both closures are open during the copy.
    try source.withMultiArray(for: name) { sourceArray in
        try target.withMultiArray(for: name) { targetArray in
            let from = try ArrayLayout(sourceArray).lengths
            let to = try ArrayLayout(targetArray).lengths
            if from == to {
                try copyAll(from: sourceArray, to: targetArray)
                return
            }
            let axis = try ArrayLayout(sourceArray).axis(seqAxis)
            var expected = from
            if to.count == from.count {
                expected[axis] = to[axis]
            }
            guard expected == to else {
                throw KVError.shapesDiffer(source: from, target: to)
            }
            try move(
                from: sourceArray, to: targetArray, position: position, axis: axis, kind)
        }
    }
}

/// Move a KV state to a model with at least as many positions.
///
/// A state with the same shape in both models is copied whole, because it may be a recurrent
/// state or a full window. No prediction with one of the states may be in progress.
///
/// - Parameters:
///   - sourceState, targetState: results of `MLModel.makeState()`.
///   - stateName: name of the state; both models must have it.
///   - currentPosition: number of tokens in the cache; later positions are dropped.
///   - padValue: value of positions without a token.
///   - seqAxis: axis of the sequence; a negative number counts from the last axis.
/// - Throws: `KVError`; the target is then unchanged.
public func transitionCoreMLState(
    sourceState: MLState,
    targetState: MLState,
    stateName: String = "kv_cache",
    currentPosition: Int,
    padValue: Double = 0,
    seqAxis: Int = -2
) throws {
    try moveState(
        from: sourceState, to: targetState, name: stateName, position: currentPosition,
        seqAxis: seqAxis, .expand(pad: padValue))
}

/// Move a KV state to a model with more or fewer positions, if the tokens fit.
///
/// As `transitionCoreMLState`, but in both directions; other positions become 0.
public func transitionState(
    source: MLState, target: MLState, name: String, position: Int, seqAxis: Int = -2
) throws {
    try moveState(
        from: source, to: target, name: name, position: position, seqAxis: seqAxis, .compact)
}
