import CoreML
import XCTest

@testable import MLState

final class TransitionTests: XCTestCase {
    /// An array with a different number in every element.
    private func numbered(
        _ shape: [Int], _ type: MLMultiArrayDataType = .float32
    ) throws -> MLMultiArray {
        let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: type)
        for index in 0..<array.count {
            array[index] = NSNumber(value: index + 1)
        }
        return array
    }

    private func value(_ array: MLMultiArray, _ index: [Int]) -> Int {
        array[index.map { NSNumber(value: $0) }].intValue
    }

    func testExpandCopiesTokensAndPads() throws {
        for type in [MLMultiArrayDataType.float16, .float32, .double, .int32] {
            let small = try numbered([2, 1, 4, 3], type)
            let large = try transitionKVState(
                sourceState: small, targetSeqLength: 6, currentPosition: 3)
            XCTAssertEqual(large.shape, [2, 1, 6, 3])
            XCTAssertEqual(large.dataType, type)
            XCTAssertEqual(value(large, [1, 0, 2, 2]), value(small, [1, 0, 2, 2]))
            XCTAssertEqual(value(large, [1, 0, 3, 0]), 0)
            XCTAssertEqual(value(large, [1, 0, 5, 2]), 0)
        }
    }

    func testCompactKeepsTheTokens() throws {
        let large = try numbered([2, 1, 8, 3])
        let small = try compactKVState(sourceState: large, targetSeqLength: 4, currentPosition: 3)
        XCTAssertEqual(small.shape, [2, 1, 4, 3])
        XCTAssertEqual(value(small, [1, 0, 2, 1]), value(large, [1, 0, 2, 1]))
        XCTAssertEqual(value(small, [1, 0, 3, 1]), 0)
    }

    func testInnermostSequence() throws {
        let small = try numbered([2, 3, 1, 4])
        let large = try transitionKVState(sourceState: small, targetSeqLength: 5, seqAxis: -1)
        XCTAssertEqual(value(large, [1, 2, 0, 3]), value(small, [1, 2, 0, 3]))
        XCTAssertEqual(value(large, [1, 2, 0, 4]), 0)
    }

    func testTokensMustFit() throws {
        let cache = try numbered([2, 1, 8, 3])
        let capacity = KVError.refused(code: 5)
        for (length, position) in [(4, 5), (4, -1), (0, 0), (9, 9)] {
            XCTAssertThrowsError(
                try compactKVState(
                    sourceState: cache, targetSeqLength: length, currentPosition: position)
            ) { XCTAssertEqual($0 as? KVError, capacity) }
        }
        XCTAssertThrowsError(try transitionKVState(sourceState: cache, targetSeqLength: 7)) {
            XCTAssertEqual($0 as? KVError, capacity)
        }
        XCTAssertEqual("\(capacity)", "the tokens or the position do not fit the length")
    }

    func testMaskFollowsTheFormula() throws {
        let mask = try attentionSizeMask(
            seqLength: 6, attentionSize: 1, sinks: 1, rows: 3..<5, dataType: .float32, fill: -5)
        XCTAssertEqual(mask.shape, [1, 1, 2, 6])
        let rows = (0..<2).map { row in (0..<6).map { value(mask, [0, 0, row, $0]) } }
        XCTAssertEqual(rows, [[0, -5, 0, 0, -5, -5], [0, -5, -5, 0, 0, -5]])
        XCTAssertThrowsError(try attentionSizeMask(seqLength: 4, attentionSize: -1))
        XCTAssertThrowsError(try attentionSizeMask(seqLength: 4, attentionSize: 1, rows: 3..<5))
        XCTAssertThrowsError(
            try attentionSizeMask(seqLength: 4, attentionSize: 1, dataType: .int32))
    }
}
