"""The strategies as their specification defines them, in plain Python, to compare with the core.

Where the specification has a C# float, this has `numpy.float32`.
"""

import numpy as np


class Interval:
    def __init__(self, interval=2):
        self.interval, self.checkpointed_count = interval, 0

    def should_checkpoint(self, layer_id, activation, layer_index):
        should_checkpoint = (layer_index % self.interval) == 0
        if should_checkpoint:
            self.checkpointed_count += 1
        return should_checkpoint

    def reset(self):
        self.checkpointed_count = 0


class Selective:
    def __init__(self, checkpoint_layers=(), exclude_layers=()):
        self.checkpoint_layers = set(checkpoint_layers)
        self.exclude_layers = set(exclude_layers)

    def should_checkpoint(self, layer_id, activation, layer_index):
        if layer_id in self.exclude_layers:
            return False
        return layer_id in self.checkpoint_layers

    def reset(self):
        pass


class SizeBased:
    def __init__(self, min_activation_size_bytes=1024 * 1024, exclude_layers=()):
        self.min_bytes = min_activation_size_bytes
        self.exclude_layers = set(exclude_layers)
        self.checkpointed_count = 0

    def should_checkpoint(self, layer_id, activation, layer_index):
        if layer_id in self.exclude_layers:
            return False
        activation_size = activation.size * activation.itemsize
        should_checkpoint = activation_size >= self.min_bytes
        if should_checkpoint:
            self.checkpointed_count += 1
        return should_checkpoint

    def reset(self):
        self.checkpointed_count = 0


class MemoryAware:
    """`clock` returns ticks of 100 ns, as DateTime does; `tracker` returns bytes in use."""

    def __init__(self, max_memory_percentage, tracker, total_memory, clock):
        self.max_memory_percentage = np.float32(max_memory_percentage)
        self.tracker, self.total, self.clock = tracker, total_memory, clock
        self.reset()

    def should_checkpoint(self, layer_id, activation, layer_index):
        memory_pressure = np.float32(self.tracker()) / np.float32(self.total)
        self.adjust_interval(memory_pressure)
        return (layer_index % self.current_interval) == 0

    def adjust_interval(self, memory_pressure):
        now = self.clock()
        time_since_last_adjustment = (now - self.last_adjustment_time) / 1e7
        if time_since_last_adjustment < 10:
            return
        threshold = self.max_memory_percentage
        if memory_pressure > threshold:
            self.current_interval = max(1, self.current_interval - 1)
            self.consecutive_high_memory_pressure += 1
        elif memory_pressure < threshold * np.float32(0.8):
            if self.consecutive_high_memory_pressure == 0 or time_since_last_adjustment > 30:
                self.current_interval = min(10, self.current_interval + 1)
        else:
            self.consecutive_high_memory_pressure = 0
        self.last_adjustment_time = now

    def reset(self):
        self.current_interval = 2
        self.last_adjustment_time = self.clock()
        self.consecutive_high_memory_pressure = 0


class Smart:
    def __init__(self, exclude_layers=()):
        self.layer_info = []
        self.layer_activation_sizes = {}
        self.layer_access_counts = {}
        self.exclude_layers = set(exclude_layers)
        self.initialized = False

    def should_checkpoint(self, layer_id, activation, layer_index):
        self.update_layer_statistics(layer_id, activation)
        if not self.initialized:
            if layer_index > 10:
                self.initialized = True
            return False
        if layer_id in self.exclude_layers:
            return False
        return self.should_checkpoint_heuristic(layer_id, layer_index)

    def update_layer_statistics(self, layer_id, activation):
        activation_size = activation.size * activation.itemsize
        if layer_id not in self.layer_activation_sizes:
            self.layer_activation_sizes[layer_id] = activation_size
            self.layer_access_counts[layer_id] = 0
            self.layer_info.append(activation_size)
        self.layer_access_counts[layer_id] += 1

    def should_checkpoint_heuristic(self, layer_id, layer_index):
        if layer_id not in self.layer_activation_sizes:
            return False
        activation_size = self.layer_activation_sizes[layer_id]
        avg_size = sum(self.layer_info) / len(self.layer_info)
        if activation_size > avg_size * 1.5:
            return True
        if self.layer_access_counts[layer_id] < 2:
            return True
        return layer_index > len(self.layer_info) * 0.7

    def reset(self):
        self.layer_info.clear()
        self.layer_activation_sizes.clear()
        self.layer_access_counts.clear()
        self.initialized = False
