// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
)

// load is the traffic of a host's clients until stopped.
type load struct {
	wrk, dnsperf *program
	http         *httpClients
	quic         *quicClients
	keep         *keepClients
}

// program is an external load generator with its output.
type program struct {
	proc *lab.Process
	out  *bytes.Buffer
}

// found holds the results of all clients.
type found struct{ http, dns, quic, keep finding }

// Clients pause between requests, to leave the machine to the servers.
const (
	wrkDelay = 6   // ms, between an answer and the next request of a connection
	dnsRate  = 800 // queries/s
	dnsLimit = 6 * time.Second
)

func startLoad(ctx context.Context, e *lab.Env, h *host) (*load, error) {
	script, queries := filepath.Join(h.dir, "delay.lua"), filepath.Join(h.dir, "queries")
	if err := os.WriteFile(script, fmt.Appendf(nil, "function delay() return %d end\n", wrkDelay), 0o644); err != nil {
		return nil, err
	}
	if err := os.WriteFile(queries, []byte("www."+zone+" A\nns."+zone+" A\n"+zone+" SOA\n"), 0o644); err != nil {
		return nil, err
	}
	l := &load{}
	var err error
	l.wrk, err = start(e, h, "wrk", "-t", "1", "-c", "8", "-d", "3600", "--timeout", "30", "-s", script, "http://"+h.addr+":8080/")
	if err != nil {
		return nil, err
	}
	l.dnsperf, err = start(e, h, "dnsperf", "-s", h.addr, "-d", queries, "-l", "3600", "-c", "8", "-T", "1", "-Q", strconv.Itoa(dnsRate), "-t", fmt.Sprint(dnsLimit.Seconds()))
	if err != nil {
		return nil, err
	}
	l.http, l.quic, l.keep = startHTTP(ctx, h), startQUIC(ctx, h), startKeep(ctx, h)
	// Wait until every client has one answer: the next part runs under load.
	return l, l.begun(ctx)
}

func start(e *lab.Env, h *host, name string, args ...string) (*program, error) {
	p := &program{out: &bytes.Buffer{}}
	var err error
	p.proc, err = e.Start(lab.Command{Namespace: h.clients, Path: name, Args: args, Output: p.out, Timeout: 30 * time.Second})
	return p, err
}

// begun waits until the lab's own clients have answers; the external ones start faster.
func (l *load) begun(ctx context.Context) error {
	for end := time.Now().Add(startLimit); l.http.answered() == 0 || l.quic.ended() == 0; {
		if time.Now().After(end) {
			return fmt.Errorf("no answers to HTTP and HTTP/3 within %s: %v", startLimit, l.reasons())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// stop ends the clients and reads their results. Requests in transit at this moment do not count.
func (l *load) stop(ctx context.Context) (f found, err error) {
	lost := time.After(dnsLimit + 200*time.Millisecond) // dnsperf counts queries as lost after this time
	f.http.add(l.http.end())
	f.quic = l.quic.end()
	f.keep = l.keep.end()
	select {
	case <-lost:
	case <-ctx.Done():
		return f, ctx.Err()
	}
	for _, p := range []*program{l.wrk, l.dnsperf} {
		if err := p.end(ctx); err != nil {
			return f, err
		}
	}
	http, err := parseWrk(l.wrk.out.String())
	if err != nil {
		return f, err
	}
	f.http.add(http)
	f.dns, err = parseDNSPerf(l.dnsperf.out.String())
	return f, err
}

// end makes a generator print its results.
func (p *program) end(ctx context.Context) error {
	if !p.proc.Running() {
		return fmt.Errorf("%s ended early: %s", p.proc.Name, tail(p.out.Bytes()))
	}
	if err := p.proc.Signal(unix.SIGINT); err != nil {
		return err
	}
	select {
	case <-p.proc.Done():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(startLimit):
		return fmt.Errorf("%s did not end within %s", p.proc.Name, startLimit)
	}
}

// reasons returns the first failures.
func (l *load) reasons() []string {
	out := slices.Concat(l.http.why(), l.quic.why(), l.keep.why())
	for _, line := range strings.Split(l.wrk.out.String(), "\n") {
		if strings.Contains(line, "Socket errors") || strings.Contains(line, "Non-2xx") {
			out = append(out, "wrk: "+strings.TrimSpace(line))
		}
	}
	for _, line := range strings.Split(l.dnsperf.out.String(), "\n") {
		if strings.Contains(line, "Warning") || strings.Contains(line, "Error") {
			out = append(out, "dnsperf: "+strings.TrimSpace(line))
			break
		}
	}
	return out
}

var (
	wrkTotal  = regexp.MustCompile(`(\d+) requests in `)
	wrkErrors = regexp.MustCompile(`Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)`)
	wrkStatus = regexp.MustCompile(`Non-2xx or 3xx responses: (\d+)`)
	dnsSent   = regexp.MustCompile(`Queries sent:\s+(\d+)`)
	dnsDone   = regexp.MustCompile(`Queries completed:\s+(\d+)`)
	dnsLost   = regexp.MustCompile(`Queries lost:\s+(\d+)`)
	dnsCodes  = regexp.MustCompile(`Response codes:\s+(.*)`)
	dnsOK     = regexp.MustCompile(`NOERROR (\d+)`)
)

// numbers returns the numbers matched by a pattern, nil without a match.
func numbers(re *regexp.Regexp, text string) []int {
	m := re.FindStringSubmatch(text)
	if m == nil {
		return nil
	}
	var out []int
	for _, s := range m[1:] {
		n, err := strconv.Atoi(s)
		if err != nil {
			return nil
		}
		out = append(out, n)
	}
	return out
}

func parseWrk(text string) (finding, error) {
	total := numbers(wrkTotal, text)
	if total == nil || total[0] == 0 {
		return finding{}, fmt.Errorf("wrk reports no number of requests: %q", text)
	}
	f := finding{asked: total[0]}
	for _, n := range append(numbers(wrkErrors, text), numbers(wrkStatus, text)...) {
		f.failed += n
	}
	return f, nil
}

// parseDNSPerf counts lost queries and error answers as failed. Queries in transit at the interruption are
// neither.
func parseDNSPerf(text string) (finding, error) {
	sent, done, lost := numbers(dnsSent, text), numbers(dnsDone, text), numbers(dnsLost, text)
	if sent == nil || done == nil || lost == nil || done[0] == 0 || !dnsCodes.MatchString(text) {
		return finding{}, fmt.Errorf("dnsperf reports no number of queries: %q", text)
	}
	f := finding{asked: sent[0], failed: lost[0] + done[0]}
	for _, n := range numbers(dnsOK, text) {
		f.failed -= n
	}
	return f, nil
}
