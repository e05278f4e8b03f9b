// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

// accountant is a limiter with a bounded total and readable accounts.
type accountant interface {
	// Accounts returns the counted passed packets, and the packets charged to the total, with the limiter's
	// clock stopped at this time.
	Accounts(at uint64) (passed, spent uint64)
}

const (
	// raceLimit, in packets per second, is high enough to pass raceRuns packets on the credit of one
	// instant.
	raceLimit = 10_000_000
	// raceRuns is the number of program runs of each CPU within one system call. The CPUs collide all the
	// time.
	raceRuns = 300_000
)

// race runs two CPUs at once, at one instant of the clock. Each passing packet takes the credit of one from
// a word written by both. A passed packet without a charge is a lost update.
func (x *experiment) race(ctx context.Context) error {
	x.say("two CPUs decide at the same instant: counting lost updates")
	var lost []float64
	for i := range x.races {
		l, err := x.ours.limiter(raceLimit, false, x.env.Seed+uint64(i))
		if err != nil {
			return err
		}
		ratio, err := lostShare(l)
		l.Close()
		if errors.Is(err, errNoTotal) {
			x.result.Note("lost updates: %v", err)
			return nil // not measured, and the claim fails
		}
		if err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		lost = append(lost, ratio)
	}
	x.result.Set("lost_update_ratio_2cpu", slices.Max(lost))
	control, err := lostPlainly(x.env.Seed)
	if err != nil {
		return err
	}
	x.result.Set("rakelimit_lost_update_ratio_2cpu", control)
	return nil
}

var errNoTotal = errors.New("this limiter has no bound on its total")

func lostShare(l limiter) (float64, error) {
	a, ok := l.(accountant)
	if !ok {
		return 0, errNoTotal
	}
	at := uint64(1e12)
	var frames [][]byte
	for cpu := range uint32(2) {
		p := scenario.Packet{At: at, Src: scenario.Source{Identity: 0x05060708 + cpu<<16}, SrcPort: 999}
		if passed, err := l.One(&p); err != nil || !passed { // sets the clock
			return 0, errors.Join(fmt.Errorf("the first packet passes: %t", passed), err)
		}
		frames = append(frames, slices.Clone(l.Frame(&p)))
	}
	if err := onTwoCPUs(l.Program(), frames); err != nil {
		return 0, err
	}
	passed, spent := a.Accounts(at)
	if passed < raceRuns/10 {
		return 0, fmt.Errorf("of %d packets only %d passed: too few for collisions", 2*raceRuns, passed)
	}
	return abs(float64(passed)-float64(spent)) / float64(passed), nil
}

func abs(v float64) float64 { return max(v, -v) }

// onTwoCPUs runs a program over one frame on one CPU and over the other on another, both at once.
func onTwoCPUs(p *ebpf.Program, frames [][]byte) error {
	var wg sync.WaitGroup
	begin := make(chan struct{})
	errs := make([]error, len(frames))
	for i, frame := range frames {
		wg.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not serve other goroutines
			var set unix.CPUSet
			set.Set(i % runtime.NumCPU())
			_ = unix.SchedSetaffinity(0, &set) // some containers refuse: the kernel then chooses
			<-begin
			_, errs[i] = p.Run(&ebpf.RunOptions{Data: frame, Repeat: raceRuns})
		})
	}
	close(begin)
	wg.Wait()
	return errors.Join(errs...)
}

// lostPlainly returns the share lost in the same race by rakelimit's counter of dropped packets. It
// increments without an atomic operation. The loss proves collisions: without one the race would show
// nothing.
func lostPlainly(seed uint64) (float64, error) {
	l, err := rakelimit.New(rakelimit.Options{Limit: 1, Seed: seed})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	p := scenario.Packet{At: 1e12, Src: scenario.Source{Identity: 0x05060708}, SrcPort: 999}
	for range 1000 { // then its rate is about 50,000 pps, and the clock stands
		p.At += 20_000
		if _, _, err := l.One(&p); err != nil {
			return 0, err
		}
	}
	before, err := l.Dropped()
	if err != nil {
		return 0, err
	}
	frame := slices.Clone(l.Frame(&p))
	if err := onTwoCPUs(l.Program(), [][]byte{frame, frame}); err != nil {
		return 0, err
	}
	after, err := l.Dropped()
	return 1 - float64(after-before)/(2*raceRuns), err // 1 in 50,000 is not dropped
}
