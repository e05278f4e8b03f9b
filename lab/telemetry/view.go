// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/lab/routers"
)

// view draws the experiment a few times a second.
type view struct {
	stop  chan struct{}
	frame func(lines []string) []string // adds lines; nil: none
}

// begin draws until the run ends.
func (v *view) begin(x *experiment) {
	v.stop = make(chan struct{})
	x.env.OnClose(func() { close(v.stop) })
	go func() {
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		var past []snapshot // collectors write once a second: rates cover the last two
		for {
			select {
			case <-v.stop:
				return
			case <-tick.C:
			}
			now := x.snapshot()
			past = append(past, now)
			past = past[max(0, len(past)-8):]
			lines := now.draw(past[0])
			if v.frame != nil {
				lines = v.frame(lines)
			}
			x.env.Watch.Show(lines)
		}
	}()
}

// slotView is one line of the picture.
type slotView struct {
	state      string
	serving    bool
	pid        int
	devices    int
	sessions   int // BMP sessions up at the collector, of devices with a current session
	ipfix, bmp int // records counted so far
}

type snapshot struct {
	at                  time.Time
	slots               []slotView
	devices, up         int
	datagrams, messages int64
	restarts, of        int
	misdirected, others int
	rejected            int
	control             bool
	fast                fastView
}

// fastView is the line about all services of fast sinks.
type fastView struct {
	services, devices, up, restarts, of int
	misdirected, others                 int
}

func (x *experiment) fastView() (v fastView) {
	for _, s := range x.fast {
		s.mu.Lock()
		fleet, ledger, restarts := s.fleet, s.ledger, s.restarted
		s.mu.Unlock()
		v.services++
		v.of += x.plan.fast.kills.restarts
		v.restarts += restarts
		if ledger == nil {
			continue
		}
		v.up += fleet.Up()
		v.devices += len(fleet.Devices)
		v.misdirected += ledger.strays()
		v.others += ledger.rejections()
	}
	return v
}

// snapshot takes the state of the whole experiment.
func (x *experiment) snapshot() snapshot {
	s := snapshot{at: time.Now(), of: x.kills.restarts, control: x.weir == nil, devices: len(x.ledger.accounts), up: x.fleet.Up(), fast: x.fastView()}
	s.datagrams, s.messages = x.fleet.Total()
	x.mu.Lock()
	s.restarts = x.restarted
	x.mu.Unlock()
	serving := map[int]bool{}
	for _, c := range x.collectors {
		serving[c.Number] = x.weir == nil && c.Running()
		if x.weir != nil {
			pid, err := x.service.Occupant(c.Number)
			serving[c.Number] = err == nil && pid != 0 // on_empty is reject: an empty slot rejects
		}
	}
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	s.misdirected, s.others, s.rejected = x.ledger.misdirected, x.ledger.rejected, x.ledger.rejectedDead
	for _, c := range x.collectors {
		v := slotView{pid: c.PID(), serving: serving[c.Number]}
		switch {
		case v.serving:
			v.state = "serving"
		case c.Running():
			v.state = "starting: rejecting"
		default:
			v.state = "dead: rejecting"
		}
		s.slots = append(s.slots, v)
	}
	for i, a := range x.ledger.accounts {
		slot := a.slot
		if slot == unknown {
			for at := range a.collectors() {
				s.slots[at].devices++
			}
			continue
		}
		v := &s.slots[slot]
		v.devices++
		if a.real && a.peerUps > 0 && v.serving {
			v.sessions++
		} else if !a.real {
			if n, up := x.fleet.Session(i); up && a.session >= n {
				v.sessions++
			}
		}
		v.ipfix += a.total[routers.IPFIX]
		v.bmp += a.total[routers.BMP]
	}
	return s
}

// draw renders the picture for 80 columns. Rates are computed against before.
func (s snapshot) draw(before snapshot) []string {
	seconds := s.at.Sub(before.at).Seconds()
	rate := func(now, then int64) float64 {
		if seconds <= 0 {
			return 0
		}
		return max(0, float64(now-then)/seconds)
	}
	lines := []string{
		fmt.Sprintf("%d routers  %5.0f IPFIX datagrams/s  %5.0f BMP messages/s  %d of %d restarts", s.devices,
			rate(s.datagrams, before.datagrams), rate(s.messages, before.messages), s.restarts, s.of),
		"",
		"slot  collector    state                routers  BMP up   IPFIX rec/s  BMP msg/s",
	}
	for i, v := range s.slots {
		var was slotView
		if i < len(before.slots) {
			was = before.slots[i]
		}
		lines = append(lines, fmt.Sprintf("%4d  pid %-8d %-20s %7d  %6d   %11.0f  %9.0f", i, v.pid, v.state, v.devices, v.sessions,
			rate(int64(v.ipfix), int64(was.ipfix)), rate(int64(v.bmp), int64(was.bmp))))
	}
	lines = append(lines, "",
		fmt.Sprintf("misdirected %d   rejected: dead collectors %d, others %d", s.misdirected, s.rejected, s.others))
	if f := s.fast; f.services > 0 {
		lines = append(lines, "", fmt.Sprintf("fast sinks: %d services, %d of %d routers up, %d of %d restarts", f.services, f.up, f.devices, min(f.restarts, f.of), f.of),
			fmt.Sprintf("misdirected %d   rejected: live collectors %d", f.misdirected, f.others))
	}
	if s.control {
		lines = append(lines, "no weir here: \"routers\" counts a router once for each collector it reached")
	}
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return lines
}
