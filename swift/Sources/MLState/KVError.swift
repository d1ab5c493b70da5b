import CMLState
import CoreML

/// Why an operation on a cache was refused. The target is then unchanged.
public enum KVError: Error, Equatable, CustomStringConvertible {
    /// The C library refused the arguments; the code is one of `MLSTATE_KV_ERROR_…`.
    case refused(code: Int32)
    /// Core ML's data type has no dtype in the C library.
    case unsupportedDataType(MLMultiArrayDataType)
    /// The buffer is smaller than shape and strides say.
    case bufferTooSmall(needed: Int, bytes: Int)
    /// Two caches differ in another axis than the sequence.
    case shapesDiffer(source: [Int], target: [Int])
    /// Source and target are the same state.
    case sameState

    public var description: String {
        switch self {
        case .refused(let code):
            return String(cString: mlstate_kv_error_text(code))
        case .unsupportedDataType(let type):
            return "the data type \(type.rawValue) is not supported"
        case .bufferTooSmall(let needed, let bytes):
            return "the buffer has \(bytes) bytes, its shape and strides need \(needed)"
        case .shapesDiffer(let source, let target):
            return "the shapes \(source) and \(target) differ in another axis than the sequence"
        case .sameState:
            return "source and target are the same state"
        }
    }

    /// Throw unless a function of the C library returned `MLSTATE_KV_OK`.
    static func check(_ code: Int32) throws {
        if code != 0 {
            throw KVError.refused(code: code)
        }
    }
}
