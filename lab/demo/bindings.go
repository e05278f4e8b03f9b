// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/lab/routers"
	"github.com/weir-project/weir/lab/topo"
)

func init() {
	Register(Demo{
		Name:  "bindings",
		Short: "one nginx at one port serves a /24, then a million addresses; nothing restarts",
		Needs: []string{"nginx"},
		Run:   func(ctx context.Context, s *Stage) error { return (&binding{Stage: s}).run(ctx) },
	})
}

// binding is the demonstration of bindings.
type binding struct {
	*Stage
	host   *Host
	dialer *routers.Dialer

	mu    sync.Mutex
	lines []string // of the picture: bindings
	asked int
	right int
}

func (d *binding) run(ctx context.Context) error {
	return all(ctx, d.build, d.prefix, d.half, d.million)
}

// build starts two servers at loopback ports, where no client reaches them.
func (d *binding) build(ctx context.Context) (err error) {
	if d.host, err = d.Host("servers"); err != nil {
		return err
	}
	clients, err := d.Host("clients")
	if err != nil {
		return err
	}
	if err := Cable(d.host, "clients", "10.97.0.1/30", clients, "up", "10.97.0.2/30"); err != nil {
		return err
	}
	if err := topo.Route(clients.Handle, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.97.0.1")); err != nil {
		return err
	}
	d.dialer = routers.NewDialer(clients.Handle)
	d.OnClose(func() { d.dialer.Close() })
	for name, listen := range map[string]string{"www": "127.0.0.1:8080", "canary": "127.0.0.1:8081"} {
		if _, _, err := d.host.nginx(name, listen); err != nil {
			return err
		}
		if err := d.host.reachable(ctx, listen); err != nil {
			return err
		}
	}
	d.Live(d.picture)
	return d.Say(ctx, "bind(2) gives a socket one address, or all. A binding leads a prefix to a socket. Two nginx listen at 127.0.0.1:8080 and 8081")
}

// prefix binds a /24.
func (d *binding) prefix(ctx context.Context) error {
	d.Typed("ip route add local 192.0.2.0/24 dev lo")
	if _, err := d.host.Exec(ctx, "ip", "route", "add", "local", "192.0.2.0/24", "dev", "lo"); err != nil {
		return err
	}
	for _, c := range [][]string{
		{"steer", "register", "www", "tcp", "127.0.0.1", "8080", "--pidfile", filepath.Join(d.Dir, "www.pid")},
		{"steer", "register", "canary", "tcp", "127.0.0.1", "8081", "--pidfile", filepath.Join(d.Dir, "canary.pid")},
		{"bind", "add", "www", "tcp", "192.0.2.0/24", "80"},
	} {
		if _, err := d.host.Type(ctx, c...); err != nil {
			return err
		}
	}
	d.set("192.0.2.0/24 port 80  ──▶ www     127.0.0.1:8080")
	n, right := d.ask(ctx, netip.MustParseAddr("192.0.2.0"), 256, func(netip.Addr) string { return "www" })
	d.Check(right == n, "%d of %d addresses of the /24 are answered by www", right, n)
	d.Sum("One binding: %d of %d addresses of a /24 answered by one nginx.", right, n)
	return nil
}

// half moves a half of the prefix to the other server.
func (d *binding) half(ctx context.Context) error {
	if err := d.Say(ctx, "a longer prefix goes first: half of the addresses move to the other server, with one store in the kernel"); err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "bind", "add", "canary", "tcp", "192.0.2.128/25", "80"); err != nil {
		return err
	}
	d.set("192.0.2.0/24 port 80    ──▶ www     127.0.0.1:8080", "192.0.2.128/25 port 80  ──▶ canary  127.0.0.1:8081")
	upper := netip.MustParsePrefix("192.0.2.128/25")
	n, right := d.ask(ctx, netip.MustParseAddr("192.0.2.0"), 256, func(a netip.Addr) string {
		if upper.Contains(a) {
			return "canary"
		}
		return "www"
	})
	d.Check(right == n, "%d of %d addresses are answered by the right server", right, n)
	_, err := d.host.Type(ctx, "bind", "list", "--covers", "192.0.2.200")
	return err
}

// million binds single addresses at once.
func (d *binding) million(ctx context.Context) error {
	prefix, total := netip.MustParsePrefix("10.0.0.0/12"), 1_000_000
	if d.Short() {
		total = 4096
	}
	if err := d.Say(ctx, "now %d single addresses, loaded from a file, in force at one moment", total); err != nil {
		return err
	}
	file := filepath.Join(d.Dir, "million.json")
	if err := writeBindings(file, prefix.Addr(), total); err != nil {
		return err
	}
	d.Typed("ip route add local %s dev lo", prefix)
	if _, err := d.host.Exec(ctx, "ip", "route", "add", "local", prefix.String(), "dev", "lo"); err != nil {
		return err
	}
	begin := time.Now()
	if _, err := d.host.Type(ctx, "bind", "load", file, "--lines", "0"); err != nil {
		return err
	}
	took := time.Since(begin)
	d.set("192.0.2.0/24 port 80    ──▶ www     127.0.0.1:8080", "192.0.2.128/25 port 80  ──▶ canary  127.0.0.1:8081",
		fmt.Sprintf("%-22s  ──▶ www     127.0.0.1:8080", fmt.Sprint(total, " addresses")))
	n, right := d.ask(ctx, prefix.Addr(), total, func(netip.Addr) string { return "www" })
	d.Check(right == n, "%d of %d addresses drawn from these are answered by www", right, n)
	d.Sum("%d bindings of single addresses loaded in %.1f s; %d of %d drawn ones answered.", total, took.Seconds(), right, n)
	d.Sum("No process was restarted, and no socket was opened.")
	_, err := d.host.Type(ctx, "steer", "services")
	return err
}

// writeBindings writes a file with a binding for each address.
func writeBindings(file string, first netip.Addr, n int) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriter(f)
	w.WriteString(`{"bindings": [`)
	for i, a := 0, first; i < n; i, a = i+1, a.Next() {
		if i > 0 {
			w.WriteByte(',')
		}
		fmt.Fprintf(w, "\n"+`{"label": "www", "prefix": "%s", "port": 80, "protocol": "tcp"}`, a)
	}
	w.WriteString("\n]}\n")
	return w.Flush()
}

// ask sends requests to drawn addresses of a range, and counts the right answers.
func (d *binding) ask(ctx context.Context, first netip.Addr, size int, want func(netip.Addr) string) (n, right int) {
	base := binary.BigEndian.Uint32(first.AsSlice())
	for n = 0; n < 100 && ctx.Err() == nil; n++ {
		to := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, base+uint32(rand.IntN(size)))))
		c := crowd{dialer: d.dialer, to: netip.AddrPortFrom(to, 80)}
		if from, err := c.get(netip.MustParseAddr("10.97.0.2")); err == nil && from == want(to) {
			right++
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked, d.right = d.asked+n, d.right+right
	return n, right
}

func (d *binding) set(lines ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = lines
}

func (d *binding) picture() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	lines := []string{"address ──▶ longest binding ──▶ socket", ""}
	if len(d.lines) == 0 {
		lines = append(lines, "  (no binding)")
	}
	for _, l := range d.lines {
		lines = append(lines, "  "+strings.TrimSpace(l))
	}
	return append(lines, "", fmt.Sprintf("%d requests, %d right answers", d.asked, d.right))
}
