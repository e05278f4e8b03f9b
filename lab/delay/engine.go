// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"encoding/binary"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// headerLen is that of struct virtio_net_hdr (linux/virtio_net.h), which stands before
// every frame: it tells how the kernel is to cut a large one, and which checksum is
// still to be made.
const headerLen = 10

// direction carries frames from one device to the other. Its run is the only one to
// touch what is not atomic.
type direction struct {
	in, out int // descriptors, non-blocking
	line    Line
	fates   *Fates
	queue   pending
	free    int64 // when the last bit of what was accepted will have left, ns

	packets, bytes, lost, late, dropped, sent, refused atomic.Uint64
	lateness                                           histogram
}

// clock is monotonic, in ns. It is read twice a packet: time.Now would read the wall
// clock as well.
func clock() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

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
			d.sent.Add(1)
		} else {
			d.refused.Add(1)
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
	bytes := wireLen(frame)
	d.packets.Add(1)
	d.bytes.Add(uint64(bytes))
	var fate Fate
	if !spared(frame[headerLen:]) {
		fate = d.fates.Next()
	}
	at := now
	if d.line.Rate > 0 {
		begin := max(d.free, now)
		if waiting := float64(begin-now) * float64(d.line.Rate) / 8e9; int(waiting)+bytes > d.line.queue() && waiting > 0 {
			d.dropped.Add(1)
			return
		}
		d.free = begin + int64(float64(bytes)*8e9/float64(d.line.Rate))
		at = d.free
	}
	if fate.Lost { // on its way: it has taken its time on a rated line
		d.lost.Add(1)
		return
	}
	at += int64(d.line.Delay)
	if fate.Late {
		d.late.Add(1)
		at += int64(d.line.later())
	}
	d.queue.push(at, frame)
}

// wireLen is how many bytes a frame takes on a wire: a large one of TCP becomes many,
// each with headers of its own.
func wireLen(frame []byte) int {
	n := len(frame) - headerLen
	headers, size := int(binary.NativeEndian.Uint16(frame[2:])), int(binary.NativeEndian.Uint16(frame[4:]))
	if frame[1] == unix.VIRTIO_NET_HDR_GSO_NONE || size == 0 || n <= headers {
		return n
	}
	segments := (n - headers + size - 1) / size
	return n + (segments-1)*headers
}

// Stats are what one direction has done since it was made.
type Stats struct {
	Packets uint64 `json:"packets"` // that came in; a large one of TCP is one
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
		LatenessMax: time.Duration(d.lateness.most.Load())}
}
