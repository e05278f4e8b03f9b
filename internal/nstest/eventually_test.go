// SPDX-License-Identifier: Apache-2.0

package nstest_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// failing is a test failed by f: its message, and whether f ended it.
type failing struct {
	testing.TB
	said  string
	ended bool
}

func fails(t *testing.T, f func(t testing.TB)) *failing {
	t.Helper()
	x := &failing{TB: t, ended: true}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(x)
		x.ended = false
	}()
	<-done
	return x
}

func (f *failing) Fatal(args ...any) {
	f.said = fmt.Sprint(args...)
	runtime.Goexit()
}

func (f *failing) Fatalf(format string, args ...any) { f.Fatal(fmt.Sprintf(format, args...)) }

func TestEventually(t *testing.T) {
	calls := 0
	nstest.Eventually(t, func() error {
		if calls++; calls < 5 {
			return errors.New("not yet")
		}
		return nil
	})
	if calls != 5 {
		t.Errorf("%d calls, want 5", calls)
	}
}

// TestPoll checks that a condition is called often at first, seldom later, and once more after the
// timeout.
func TestPoll(t *testing.T) {
	const timeout = 500 * time.Millisecond
	calls, began, last := 0, time.Now(), time.Duration(0)
	err := nstest.Poll(timeout, func() error {
		calls++
		last = time.Since(began)
		return fmt.Errorf("call %d", calls)
	})
	if err == nil || !strings.HasSuffix(err.Error(), fmt.Sprint("call ", calls)) {
		t.Errorf("%v, want the error of call %d", err, calls)
	}
	if last < timeout {
		t.Errorf("the last call was after %v of %v", last, timeout)
	}
	if calls < 2 || calls > 70 { // ten of 1 ms, some 25 up to 20 ms, 15 of 20 ms; a stalled machine makes fewer
		t.Errorf("%d calls", calls)
	}
	if err := nstest.Poll(0, func() error { return nil }); err != nil {
		t.Error(err)
	}
}

// waiter waits for a file, in a child without flags.
func waiter(args []string) error {
	return nstest.Poll(nstest.Timeout(), func() error { _, err := os.Stat(args[0]); return err })
}

func TestPollInChild(t *testing.T) {
	if out, err := nstest.Child("waiter", t.TempDir()).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestSteadily(t *testing.T) {
	began := time.Now()
	nstest.Steadily(t, 50*time.Millisecond, func() error { return nil })
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("steady for %v only", took)
	}
	calls := 0
	x := fails(t, func(t testing.TB) {
		nstest.Steadily(t, time.Minute, func() error {
			if calls++; calls == 3 {
				return errors.New("a datagram came")
			}
			return nil
		})
	})
	if !x.ended || calls != 3 || !strings.HasSuffix(x.said, "of 1m0s: a datagram came") {
		t.Errorf("ended %t after %d calls: %q", x.ended, calls, x.said)
	}
}

func ExamplePoll() {
	sent := 0
	err := nstest.Poll(time.Minute, func() error {
		if sent++; sent < 3 {
			return fmt.Errorf("%d datagrams of 3 were sent", sent)
		}
		return nil
	})
	fmt.Println(sent, err)
	// Output: 3 <nil>
}
