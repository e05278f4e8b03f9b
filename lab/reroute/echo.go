// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
)

// echoing is a BFD session with echo, reflected by a neighbour's kernel over a cuttable link. Its control
// packets have ten times the interval, because their other end is a process.
type echoing struct {
	session   engine.Session
	link      *cutter
	durations []time.Duration // from the cut to the verdict
	cuts      int
	others    int // verdicts not due to echo
}

// Settings of echo packets. bfdd announces the same interval as its minimum for received echo.
const (
	echoInterval   = 10 * time.Millisecond
	echoMultiplier = 3
)

func newEchoing(e *lab.Env, here *netns.Handle, n neighbour) (*echoing, error) {
	err := n.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/all/forwarding", []byte("1"), 0) })
	if err != nil {
		return nil, fmt.Errorf("connect the neighbour reflecting echo: %w", err)
	}
	n.session.Echo, n.session.Multiplier = echoInterval, echoMultiplier
	link, err := newCutter(e, [2]*netns.Handle{here, n.ns}, [2]string{n.device, "w0"})
	return &echoing{session: n.session, link: link}, err
}

// echo cuts its link, and measures the time until the session is down.
func (x *experiment) echo(ctx context.Context) error {
	e := x.bfd.echoing
	if e == nil {
		return nil
	}
	x.say("%d cuts of a link with echo reflected by a bfdd's kernel", x.echoes)
	for e.cuts < x.echoes {
		if err := x.returning(ctx, e); err != nil {
			return err
		}
		time.Sleep(time.Duration(e.cuts%10) * time.Millisecond) // vary the position between two packets
		moment, err := e.link.cut(true, true)
		if err != nil {
			return err
		}
		st, err := x.awaitEcho(ctx, e, func(st engine.Status) bool { return st.State != bfd.Up })
		if err != nil {
			return err
		}
		took := st.Since - time.Duration(moment)
		switch {
		case st.State == bfd.Up:
			e.cuts++
		case took < 0: // bfdd was silent for too long before the cut: no result
		case st.Diag != bfd.EchoFailed:
			e.cuts++
			e.others++
		default:
			e.cuts++
			e.durations = append(e.durations, took)
		}
		if _, err := e.link.cut(false, false); err != nil {
			return err
		}
	}
	x.reportEcho(e)
	return nil
}

// returning waits until the session is up and echo returns at the rate of sending.
func (x *experiment) returning(ctx context.Context, e *echoing) error {
	var seen uint64
	st, err := x.awaitEcho(ctx, e, func(st engine.Status) bool {
		if st.State != bfd.Up || st.Polling || st.Echo.Interval != echoInterval || st.Echo.Failed {
			seen = 0
			return false
		}
		if seen == 0 {
			seen = st.Echo.Returned
		}
		return st.Echo.Returned > seen+50
	})
	if err == nil && (st.State != bfd.Up || st.Echo.Failed) {
		err = fmt.Errorf("echo does not return: %+v", st)
	}
	return err
}

// awaitEcho waits for a state of the session, and returns its final state.
func (x *experiment) awaitEcho(ctx context.Context, e *echoing, ok func(engine.Status) bool) (st engine.Status, err error) {
	for end := time.Now().Add(patience); ; {
		if st, _, err = x.bfd.engine.Status(e.session.Discriminator); err != nil || ok(st) || time.Now().After(end) {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (x *experiment) reportEcho(e *echoing) {
	x.result.Set("echo_cuts", float64(e.cuts))
	x.result.Set("echo_undetected", float64(e.cuts-len(e.durations)))
	if e.others > 0 {
		x.result.Note("of %d cuts %d were detected by other means than echo", e.cuts, e.others)
	}
	if len(e.durations) > 0 {
		slices.Sort(e.durations)
		ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
		x.result.Set("detect_ms_p50_echo", ms(e.durations[len(e.durations)/2]))
		x.result.Set("detect_ms_max_echo", ms(e.durations[len(e.durations)-1]))
	}
	x.result.Claim(lab.Correctness, "cuts of a link with a bfdd's host not detected by BFD's echo", "echo_undetected", "== 0")
}
