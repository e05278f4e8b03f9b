// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// metricsEvery is the time between two attempts to listen for scrapers.
const metricsEvery = 5 * time.Second

// metricsPort is the TCP address of /metrics and /healthz. Any user of the host may occupy it while no weir serve runs.
// weir serve then does everything else, and retries.
type metricsPort struct {
	address string
	log     *slog.Logger

	mu  sync.Mutex
	err error // error of the last attempt
}

// failure returns why scraping is impossible. A nil port has no failure.
func (p *metricsPort) failure() error {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// serve serves until ctx is done. It returns permanent errors, such as an invalid address.
func (p *metricsPort) serve(ctx context.Context, public http.Handler) error {
	for {
		l, err := accept.TCP(ctx, p.log, p.address)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			p.note(nil)
			p.log.Info("serving /metrics and /healthz", "address", l.Addr().String())
			return accept.HTTP(ctx, l, public, accept.Options{Name: "metrics", Write: scrapeTime, Log: p.log})
		case !errors.Is(err, syscall.EADDRINUSE) && !errors.Is(err, syscall.EADDRNOTAVAIL):
			return fmt.Errorf("serve metrics: %w", users.Lacking(err, unix.CAP_NET_BIND_SERVICE))
		}
		p.note(fmt.Errorf("cannot serve metrics: %w", err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(metricsEvery):
		}
	}
}

// note records the outcome of an attempt, and logs a failure.
func (p *metricsPort) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err = err; err != nil {
		p.log.Warn("metrics not served, retrying", "address", p.address, "err", err, "interval", metricsEvery)
	}
}
