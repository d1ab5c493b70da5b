import CMLState
import CoreML

/// Shape, strides and dtype of a multi-array, as the C library takes them.
struct ArrayLayout {
    var shape: [Int64]
    /// In elements, as those of `MLMultiArray`.
    var strides: [Int64]
    let dtype: Int32

    /// Describe an array. `strides` are those of the buffer, if they are not the array's own.
    init(_ array: MLMultiArray, strides: [Int]? = nil) throws {
        shape = array.shape.map { Int64(truncating: $0) }
        self.strides = strides?.map { Int64($0) } ?? array.strides.map { Int64(truncating: $0) }
        dtype = try ArrayLayout.dtype(of: array.dataType)
    }

    static func dtype(of type: MLMultiArrayDataType) throws -> Int32 {
        switch type {
        case .float16: return Int32(MLSTATE_KV_FLOAT16)
        case .float32: return Int32(MLSTATE_KV_FLOAT32)
        case .double: return Int32(MLSTATE_KV_FLOAT64)
        case .int32: return Int32(MLSTATE_KV_INT32)
        default: throw KVError.unsupportedDataType(type)
        }
    }

    var rank: Int32 {
        Int32(shape.count)
    }

    var lengths: [Int] {
        shape.map { Int($0) }
    }

    /// The axis from 0, for one that may count from the last axis.
    func axis(_ seqAxis: Int) throws -> Int {
        let axis = seqAxis < 0 ? seqAxis + shape.count : seqAxis
        guard shape.indices.contains(axis) else {
            throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_SHAPE))
        }
        return axis
    }

    /// Throw unless a buffer of `bytes` bytes has every element. Strides of Core ML are not
    /// negative.
    func check(bytes: Int) throws {
        let item = mlstate_kv_dtype_bytes(dtype)
        var last = 0
        for (length, stride) in zip(shape, strides) {
            guard length > 0, stride >= 0 else {
                throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_SHAPE))
            }
            let (way, isLarge) = Int(length - 1).multipliedReportingOverflow(by: Int(stride))
            let (sum, isLarger) = last.addingReportingOverflow(way)
            guard !isLarge, !isLarger else {
                throw KVError.refused(code: Int32(MLSTATE_KV_ERROR_SIZE))
            }
            last = sum
        }
        guard last < bytes / item else {
            throw KVError.bufferTooSmall(needed: (last + 1) * item, bytes: bytes)
        }
    }
}

/// Create an array with the shape of another one, but `length` positions along `axis`.
func makeArray(like array: MLMultiArray, length: Int, axis: Int) throws -> MLMultiArray {
    var shape = array.shape
    shape[axis] = NSNumber(value: length)
    return try MLMultiArray(shape: shape, dataType: array.dataType)
}
