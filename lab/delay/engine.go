// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// direction carries frames from one device to the other. Only run accesses the non-atomic fields.
type direction struct {
	in, out int // descriptors, non-blocking
	line    Line
	fates   *Fates
	queue   pending
	drawn   []Fate
	scratch []byte
	free    int64 // time the last bit of the accepted packets has left, ns

	packets, bytes, lost, late, dropped, sent, refused atomic.Uint64
	lateness                                           histogram
}

var epoch = time.Now()

// clock is monotonic, in ns. It avoids unix.ClockGettime, because Go's scheduler tracks this system call.
func clock() int64 { return int64(time.Since(epoch)) }

// run never returns. The calling thread is its own. Nothing in it waits for Go's scheduler (RawSyscall), so
// only the kernel can delay it.
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

// release sends all due packets. It returns the time afterwards.
func (d *direction) release(now int64) int64 {
	for len(d.queue.items) > 0 && d.queue.items[0].at <= now {
		p := d.queue.pop()
		_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(d.out), uintptr(unsafe.Pointer(&p.buf[0])), uintptr(len(p.buf)))
		// Before the write, because the write includes the work of the receiver's stack.
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

// wait returns when a packet has arrived or the next one is due.
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

// accept decides the fate of a frame.
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
	// From here on it is in transit: on a rated line lost packets take their time, too.
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

// send starts the transit of segments with one fate.
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

// Stats are the counters of one direction since its creation.
type Stats struct {
	Packets uint64 `json:"packets"` // received; segments, for a large packet of TCP
	Bytes   uint64 `json:"bytes"`   // of their frames as on a wire
	Sent    uint64 `json:"sent"`    // delivered
	Lost    uint64 `json:"lost"`    // by Line.Loss
	Late    uint64 `json:"late"`    // by Line.Reorder
	Dropped uint64 `json:"dropped"` // due to a full queue
	Refused uint64 `json:"refused"` // by the device at the other end
	// Delay of deliveries beyond their due time: a fault of the line, or of the machine.
	LatenessP50 time.Duration `json:"lateness_p50"`
	LatenessP99 time.Duration `json:"lateness_p99"`
	LatenessMax time.Duration `json:"lateness_max"`
}

func (d *direction) stats() Stats {
	return Stats{Packets: d.packets.Load(), Bytes: d.bytes.Load(), Sent: d.sent.Load(), Lost: d.lost.Load(), Late: d.late.Load(),
		Dropped: d.dropped.Load(), Refused: d.refused.Load(), LatenessP50: d.lateness.quantile(.5), LatenessP99: d.lateness.quantile(.99),
		LatenessMax: time.Duration(d.lateness.largest.Load())}
}
