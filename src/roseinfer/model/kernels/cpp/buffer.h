// Memory that a kernel keeps from one call to the next.

#pragma once

#include <cstdint>
#include <cstdlib>

#include <sys/mman.h>

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    uint8_t* take(int64_t size) {
        if (size > size_) {
            std::free(data_);
            const int64_t page = size < kHugePage / 4 ? 4096 : kHugePage;
            size_ = (size + page - 1) / page * page;
            data_ = static_cast<uint8_t*>(std::aligned_alloc(page, size_));
#ifdef MADV_HUGEPAGE
            if (page == kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
        }
        return data_;
    }

private:
    static constexpr int64_t kHugePage = 2 << 20;

    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};
