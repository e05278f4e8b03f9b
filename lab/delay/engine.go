// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// direction carries frames from one device to the other. Its run is the only one to
// touch what is not atomic.
type direction struct {
	in, out int // descriptors, non-blocking
	line    Line
	fates   *Fates
	queue   pending
	drawn   []Fate
	scratch []byte
	free    int64 // when the last bit of what was accepted will have left, ns

	packets, bytes, lost, late, dropped, sent, refused atomic.Uint64
	lateness                                           histogram
}

var epoch = time.Now()

// clock is monotonic, in ns. Not unix.ClockGettime: that is a system call of which Go's
// scheduler hears.
func clock() int64 { return int64(time.Since(epoch)) }

// run never returns. The calling thread is its own; nothing in here waits for Go's
// scheduler (RawSyscall), so that only the kernel can make it late.
func (d *direction) run() {
	frame := make([]byte, headerLen+largeBuffer)
	for {
		now := d.release(clock())
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(d.in), uintptr(unsafe.Pointer(&frame[0])), uintptr(len(frame)))
		if errno == 0 && n > headerLen {
			d.accept(now, frame[:n])
			continue
		}
		d.wait(now)
	}
}

// release sends what is due. It returns what the time is then.
func (d *direction) release(now int64) int64 {
	for len(d.queue.items) > 0 && d.queue.items[0].at <= now {
		p := d.queue.pop()
		_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(d.out), uintptr(unsafe.Pointer(&p.buf[0])), uintptr(len(p.buf)))
		// Before the receiver's stack has dealt with it, which is part of the write.
		d.lateness.add(now - p.at)
		d.queue.free(p.buf)
		if errno == 0 {
			d.sent.Add(uint64(p.segments))
		} else {
			d.refused.Add(uint64(p.segments))
		}
		now = clock()
	}
	return now
}

// wait returns when a packet has come or the next one is due.
func (d *direction) wait(now int64) {
	p := unix.PollFd{Fd: int32(d.in), Events: unix.POLLIN}
	var limit unix.Timespec
	var timeout *unix.Timespec
	if len(d.queue.items) > 0 {
		limit = unix.NsecToTimespec(max(0, d.queue.items[0].at-now))
		timeout = &limit
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
}

// accept decides what becomes of a frame.
func (d *direction) accept(now int64, frame []byte) {
	s := parseSegments(frame)
	bytes := s.wireLen()
	d.packets.Add(uint64(s.n))
	d.bytes.Add(uint64(bytes))
	fates := d.decide(&s)
	at := now
	if d.line.Rate > 0 {
		begin := max(d.free, now)
		if waiting := float64(begin-now) * float64(d.line.Rate) / 8e9; int(waiting)+bytes > d.line.queue() && waiting > 0 {
			d.dropped.Add(uint64(s.n))
			return
		}
		d.free = begin + int64(float64(bytes)*8e9/float64(d.line.Rate))
		at = d.free
	}
	// From here on it is on its way: also what is lost has taken its time on a rated line.
	at += int64(d.line.Delay)
	for from := 0; from < s.n; {
		before := from + 1
		for before < s.n && fates[before] == fates[from] {
			before++
		}
		d.send(&s, from, before, fates[from], at)
		from = before
	}
}

// decide draws a fate for every segment.
func (d *direction) decide(s *segments) []Fate {
	d.drawn = d.drawn[:0]
	if spared(s.frame[headerLen:]) {
		return append(d.drawn, Fate{})
	}
	for range s.n {
		d.drawn = append(d.drawn, d.fates.next())
	}
	return d.drawn
}

// send puts segments of one fate on their way.
func (d *direction) send(s *segments, from, before int, fate Fate, at int64) {
	n := uint64(before - from)
	if fate.Lost {
		d.lost.Add(n)
		return
	}
	if fate.Late {
		d.late.Add(n)
		at += int64(d.line.later())
	}
	frame := s.frame
	if before-from < s.n {
		d.scratch = s.cut(d.scratch, from, before)
		frame = d.scratch
	}
	d.queue.push(at, int(n), frame)
}

// Stats are what one direction has done since it was made.
type Stats struct {
	Packets uint64 `json:"packets"` // that came in; segments, of a large one of TCP
	Bytes   uint64 `json:"bytes"`   // of their frames as on a wire
	Sent    uint64 `json:"sent"`    // delivered
	Lost    uint64 `json:"lost"`    // by Line.Loss
	Late    uint64 `json:"late"`    // by Line.Reorder
	Dropped uint64 `json:"dropped"` // for a full queue
	Refused uint64 `json:"refused"` // by the device at the other end
	// How much later than due packets were delivered: the line's own fault, or the machine's.
	LatenessP50 time.Duration `json:"lateness_p50"`
	LatenessP99 time.Duration `json:"lateness_p99"`
	LatenessMax time.Duration `json:"lateness_max"`
}

func (d *direction) stats() Stats {
	return Stats{Packets: d.packets.Load(), Bytes: d.bytes.Load(), Sent: d.sent.Load(), Lost: d.lost.Load(), Late: d.late.Load(),
		Dropped: d.dropped.Load(), Refused: d.refused.Load(), LatenessP50: d.lateness.quantile(.5), LatenessP99: d.lateness.quantile(.99),
		LatenessMax: time.Duration(d.lateness.largest.Load())}
}
