// Memory that a kernel keeps from one call to the next.

#pragma once

#include <cstdint>
#include <cstdlib>

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    uint8_t* take(int64_t size) {
        if (size > size_) {
            std::free(data_);
            size_ = (size + 4095) / 4096 * 4096;
            data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, size_));
        }
        return data_;
    }

private:
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};
