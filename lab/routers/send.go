// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
	"time"
)

// patience is a device's timeout for a connection, or for a write. Then it gives the session up, like
// routers.
const patience = 20 * time.Second

// statisticsEvery is the interval of statistics, in routes.
const statisticsEvery = 20

// sleep waits, or returns false if the fleet stops first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (f *Fleet) sendIPFIX(ctx context.Context, l *lane, phase time.Duration) {
	conn, err := f.dialer.Dial("udp", l.dev.Addr, f.target(l.dev))
	if err != nil {
		f.notice(l, IPFIX, Refused, err)
		return
	}
	f.wg.Go(func() { f.readErrors(ctx, l, conn) })
	defer conn.Close()
	var buf []byte
	var announced announcement
	for ok := sleep(ctx, phase); ok; ok = sleep(ctx, f.interval()) {
		waits := f.waits(l.dev.Index)
		l.mu.Lock()
		if waits {
			if l.sparse {
				l.waited = append(l.waited, time.Now())
			}
			l.mu.Unlock()
			continue
		}
		if f.silent.Load() {
			l.mu.Unlock()
			continue
		}
		epoch := f.epoch.Load()
		now := time.Now()
		template := f.due(l, announced, epoch, now)
		buf = l.dev.IPFIX(buf[:0], l.n, template, f.cfg.Records, epoch, now)
		_, err := conn.Write(buf)
		if err == nil {
			if l.sparse {
				l.sentAt[epoch] = append(l.sentAt[epoch], now)
			}
			l.sent[epoch] += f.cfg.Records
			l.n += uint32(f.cfg.Records)
			f.datagrams.Add(1) // counted before await returns
		}
		l.mu.Unlock()
		if err != nil { // of an earlier datagram; this one was not sent
			l.refused.Store(time.Now().UnixNano())
			f.notice(l, IPFIX, Refused, err)
			continue
		}
		announced.epoch, announced.since = epoch, announced.since+1
		if template {
			announced.at, announced.since = now, 0
			l.remind.Store(false)
		}
	}
}

// announcement is a device's state about its template: the time of the last one, the number of messages
// since, and the epoch of the last message.
type announcement struct {
	at    time.Time
	since int
	epoch uint32
}

// due reports whether a device's next message includes its template.
func (f *Fleet) due(l *lane, a announcement, epoch uint32, now time.Time) bool {
	if l.remind.Load() || a.at.IsZero() {
		return true
	}
	if l.sparse {
		return now.Sub(a.at) >= TemplateTimeout
	}
	return epoch != a.epoch || a.since >= f.cfg.Refresh || l.recentlyRefused()
}

// recentlyRefused reports whether the collector may be a new one without a template. ICMP errors arrive for
// one datagram a second at most (sysctl net.ipv4.icmp_ratelimit), hence the seconds.
func (l *lane) recentlyRefused() bool {
	return time.Now().UnixNano()-l.refused.Load() < int64(4*time.Second)
}

// readErrors waits for ICMP errors about a device's datagrams; collectors send nothing.
func (f *Fleet) readErrors(ctx context.Context, l *lane, conn net.Conn) {
	var b [1]byte
	for ctx.Err() == nil {
		if _, err := conn.Read(b[:]); errors.Is(err, syscall.ECONNREFUSED) {
			l.refused.Store(time.Now().UnixNano())
			f.notice(l, IPFIX, Refused, err)
		} else if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// holdBMP keeps a session up, and reconnects after its end.
func (f *Fleet) holdBMP(ctx context.Context, l *lane, phase time.Duration) {
	if !sleep(ctx, time.Duration(l.dev.Index)*f.cfg.Ramp) {
		return
	}
	for ctx.Err() == nil {
		storm := f.newSession(l)
		l.opening.Store(true)
		conn, err := f.open(ctx, l)
		if err != nil {
			l.opening.Store(false)
			if ctx.Err() == nil {
				f.notice(l, BMP, ConnectFailed, err)
			}
			sleep(ctx, f.cfg.Retry)
			continue
		}
		f.up.Add(1)
		stormed := f.talk(ctx, l, conn, storm, phase)
		l.opening.Store(false)
		f.up.Add(-1)
		if !stormed {
			sleep(ctx, f.cfg.Retry)
		}
	}
}

// open connects and sends the first messages of a session.
func (f *Fleet) open(ctx context.Context, l *lane) (net.Conn, error) {
	conn, err := f.dialer.Dial("tcp", l.dev.Addr, f.target(l.dev))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	_ = conn.SetWriteDeadline(time.Now().Add(patience))
	b := l.dev.Initiation(nil)
	b = l.dev.PeerUp(b, int(l.session.Load()), time.Now())
	if _, err := conn.Write(b); err != nil { // also after a failed connection
		conn.Close()
		return nil, err
	}
	f.messages.Add(2)
	l.up.Store(true)
	return conn, nil
}

// talk sends routes until the session ends, and reports whether a storm ended it.
func (f *Fleet) talk(ctx context.Context, l *lane, conn net.Conn, storm <-chan struct{}, phase time.Duration) bool {
	gone := make(chan error, 1) // a collector never sends: a read returns only at the end of the session
	f.wg.Go(func() {
		_, err := conn.Read(make([]byte, 1))
		gone <- err
	})
	defer conn.Close()
	defer l.up.Store(false)
	tick := time.NewTimer(phase)
	defer tick.Stop()
	var buf []byte
	for {
		select {
		case <-ctx.Done():
			_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write(l.dev.termination(nil))
			return false
		case <-storm:
			return true
		case err := <-gone:
			f.notice(l, BMP, Lost, err)
			return false
		case <-tick.C:
		}
		var err error
		if buf, err = f.announce(l, conn, buf); err != nil {
			f.notice(l, BMP, Lost, err)
			return false
		}
		tick.Reset(f.interval())
	}
}

func (f *Fleet) announce(l *lane, conn net.Conn, buf []byte) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	epoch, now := f.epoch.Load(), time.Now()
	buf = l.dev.RouteMonitoring(buf[:0], l.n, epoch, now)
	messages := int64(1)
	if l.n%statisticsEvery == statisticsEvery-1 {
		buf = l.dev.Statistics(buf, prefixes, now)
		messages++
	}
	_ = conn.SetWriteDeadline(now.Add(patience))
	if _, err := conn.Write(buf); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.Join(err, errors.New("the collector does not read"))
		}
		return buf, err
	}
	l.sent[epoch]++
	l.n++
	f.messages.Add(messages)
	return buf, nil
}
