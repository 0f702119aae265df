// Work on weights that goes on in threads of its own while the caller prepares more of it.
#pragma once

#include "older_libraries.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace vllm_cpu {

class Background {
 public:
  // That of the calling thread, if there is one.
  static std::unique_ptr<Background>& current() {
    thread_local std::unique_ptr<Background> own;
    return own;
  }

  // With fewer threads, or none, where the system has no more: the caller does the work in the end.
  explicit Background(int64_t num_threads) {
    try {
      for (int64_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    }
  }

  // Returns when all work is done, of which the caller does a part.
  ~Background() {
    {
      const std::lock_guard lock(mutex_);
      idle_.count = 0;
      ended_ = true;
    }
    changed_.notify_all();
    work();
    for (std::thread& thread : threads_) thread.join();
  }

  // piece(0) to piece(count - 1), in any order and thread.
  void add(int64_t count, std::function<void(int64_t)> piece) {
    if (count <= 0) return;
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back({std::make_shared<std::function<void(int64_t)>>(std::move(piece)), 0, count});
    }
    changed_.notify_one();
  }

  // Do nothing of what has not begun.
  void discard() {
    std::deque<Task> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(tasks_);
    idle_.count = 0;
  }

  // The same while there is nothing else to do; what is left in the end is not done.
  void add_idle(int64_t count, std::function<void(int64_t)> piece) {
    {
      const std::lock_guard lock(mutex_);
      idle_ = {std::make_shared<std::function<void(int64_t)>>(std::move(piece)), 0, count};
    }
    changed_.notify_one();
  }

 private:
  struct Task {
    std::shared_ptr<std::function<void(int64_t)>> piece;
    int64_t next = 0, count = 0;
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty() || idle_.next < idle_.count; });
      if (tasks_.empty() && idle_.next >= idle_.count) return;
      Task& task = tasks_.empty() ? idle_ : tasks_.front();
      std::shared_ptr<std::function<void(int64_t)>> piece = task.piece;
      const int64_t index = task.next++;
      if (task.next < task.count) {
        changed_.notify_one();
      } else if (!tasks_.empty()) {
        tasks_.pop_front();
      }
      lock.unlock();
      (*piece)(index);
      // Release the last piece while others go on.
      piece.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  Task idle_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

// piece(0) to piece(count - 1), in any order: in the calling thread's background, or now, in all threads.
template <typename Piece>
void run_pieces(int64_t count, Piece piece) {
  if (Background::current() != nullptr) {
    Background::current()->add(count, std::move(piece));
    return;
  }
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) piece(i);
}

}  // namespace vllm_cpu
