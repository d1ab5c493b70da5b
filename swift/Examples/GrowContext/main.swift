// Generate with the model of the smallest context that holds the text, and move the cache to the
// next one when it is full.
//
//     swift run GrowContext small.mlmodelc large.mlmodelc
//
// Each model has the inputs `input_ids` [1, 1], `position_ids` [1] and `causal_mask`
// [1, 1, 1, context], the output `logits` [1, 1, vocabulary] and the state `kv_cache`
// [layers, heads, context, head_dim].

import CoreML
import MLState

/// One model of a ladder of contexts.
struct Step {
    let model: MLModel
    let context: Int
}

/// Runs the model of the current context, and moves to the next one before it is full.
final class InferenceManager {
    private let steps: [Step]
    private var current = 0
    private var state: MLState
    private(set) var position = 0

    init(steps: [Step]) {
        self.steps = steps.sorted { $0.context < $1.context }
        state = self.steps[0].model.makeState()
    }

    /// Move the cache to the next context if the current one is full.
    private func growIfFull() throws {
        guard position == steps[current].context, current + 1 < steps.count else {
            return
        }
        let larger = steps[current + 1].model.makeState()
        try transitionCoreMLState(
            sourceState: state, targetState: larger, stateName: "kv_cache",
            currentPosition: position)
        state = larger
        current += 1
    }

    /// Move the cache to the smallest context that holds its tokens, for example after a prefill
    /// with the largest one.
    func compact() throws {
        guard let smallest = steps.firstIndex(where: { $0.context > position }),
            smallest < current
        else {
            return
        }
        let smaller = steps[smallest].model.makeState()
        try transitionState(source: state, target: smaller, name: "kv_cache", position: position)
        state = smaller
        current = smallest
    }

    /// Run one token; returns the logits.
    func predict(token: Int32, attentionSize: Int) throws -> MLMultiArray {
        try growIfFull()
        let ids = try MLMultiArray(shape: [1, 1], dataType: .int32)
        ids[0] = NSNumber(value: token)
        let positions = try MLMultiArray(shape: [1], dataType: .int32)
        positions[0] = NSNumber(value: position)
        let mask = try attentionSizeMask(
            seqLength: steps[current].context, attentionSize: attentionSize,
            rows: position..<position + 1)
        let inputs = try MLDictionaryFeatureProvider(dictionary: [
            "input_ids": ids, "position_ids": positions, "causal_mask": mask,
        ])
        let output = try steps[current].model.prediction(from: inputs, using: state)
        position += 1
        guard let logits = output.featureValue(for: "logits")?.multiArrayValue else {
            throw CocoaError(.coderValueNotFound)
        }
        return logits
    }
}

/// The context of a model: the last axis of its mask.
func loadStep(_ path: String) throws -> Step {
    let model = try MLModel(contentsOf: URL(fileURLWithPath: path))
    let mask = model.modelDescription.inputDescriptionsByName["causal_mask"]
    guard let context = mask?.multiArrayConstraint?.shape.last?.intValue else {
        throw CocoaError(.coderValueNotFound)
    }
    return Step(model: model, context: context)
}

let manager = InferenceManager(steps: try CommandLine.arguments.dropFirst().map(loadStep))
var token: Int32 = 1
for _ in 0..<300 {
    let logits = try manager.predict(token: token, attentionSize: 128)
    var best = 0
    for index in 0..<logits.count where logits[index].floatValue > logits[best].floatValue {
        best = index
    }
    token = Int32(best)
    print(token, terminator: " ")
}
print()
