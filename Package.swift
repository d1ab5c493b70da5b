// swift-tools-version:6.0
// The Swift package is in swift/; its manifest must be in the root of the repository.
import PackageDescription

let package = Package(
    name: "mlstate",
    platforms: [.macOS(.v15), .iOS(.v18), .tvOS(.v18), .watchOS(.v11), .visionOS(.v2)],
    products: [
        .library(name: "MLState", targets: ["MLState"]),
        .library(name: "CMLState", targets: ["CMLState"]),
    ],
    targets: [
        // The C library of include/mlstate/kv.h, with the same sources as `make libmlstate-kv`.
        .target(
            name: "CMLState",
            path: ".",
            exclude: ["swift", "csrc/core/array/copy/measure_copies.c"],
            sources: [
                "csrc/core/base",
                "csrc/core/runtime",
                "csrc/core/array",
                "csrc/core/kv",
                "csrc/public",
            ],
            publicHeadersPath: "include",
            cSettings: [
                .headerSearchPath("csrc/core"),
                .define("_DARWIN_C_SOURCE"),
                .define("_GNU_SOURCE"),
            ]
        ),
        .target(name: "MLState", dependencies: ["CMLState"], path: "swift/Sources/MLState"),
        .executableTarget(
            name: "GrowContext", dependencies: ["MLState"], path: "swift/Examples/GrowContext"),
        .testTarget(
            name: "MLStateTests", dependencies: ["MLState"], path: "swift/Tests/MLStateTests"),
    ],
    swiftLanguageModes: [.v5],
    cLanguageStandard: .c11
)
