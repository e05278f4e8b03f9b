// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/lab"
)

// tenRules are ten rules of five terms each, over headers, payload, DNS and SIP.
var tenRules = []string{
	`udp.dstport == 5353 and ip.ttl < 64 and payload[-5:] == "xyzzy" and ip.src in {10.0.0.0/8 192.0.2.0/24} and not ip.flags.mf`,
	`tcp.dstport in {80 443 8080} and tcp.flags.syn and not tcp.flags.ack and tcp.window < 1024 and ip.len < 60`,
	`udp.srcport == 53 and dns.qtype == 255 and ip.len > 512 and net.src != 192.0.2.53 and not ip.flags.df`,
	`sip.method == "INVITE" and udp.dstport == 5060 and ip.dsfield.dscp != 46 and udp.length > 1000 and net.src == 198.51.100.0/24`,
	`icmp.type == 8 and ip.len > 1000 and ip.ttl < 10 and ip.src == 203.0.113.0/24 and icmp.code == 0`,
	`ipv6.src == 2001:db8::/32 and ipv6.hlim == 1 and icmpv6 and icmpv6.type in {128 129} and ipv6.plen > 100`,
	`tcp.port == 179 and (ip.ttl == 255 or ipv6.hlim == 255) and tcp.flags.reset and tcp.len == 0`,
	`udp.dstport == 123 and payload[0] & 7 and udp.length != 56 and net.src != 10.0.0.0/8 and ip.ttl > 5`,
	`udp.srcport in {19 161 389 1900 11211} and udp.length > 400 and ip and not ip.flags.mf and ip.frag_offset == 0`,
	`tcp.dstport == 22 and tcp.flags & 2 and tcp.hdr_len == 20 and ip.dsfield.ecn == 0 and ip.src != 10.0.0.0/8`,
}

// headerRules are ten rules of five terms over headers alone.
var headerRules = []string{
	`ip.src == 192.0.2.0/24 and udp.dstport == 53 and ip.ttl < 64 and ip.len > 100 and not ip.flags.df`,
	`ip.src == 198.51.100.0/24 and tcp.dstport == 80 and tcp.flags.syn and not tcp.flags.ack and tcp.window < 1024`,
	`ip.dst == 203.0.113.7 and tcp.dstport in {22 23} and tcp.flags.syn and ip.ttl > 200 and ip.len == 40`,
	`ipv6.src == 2001:db8::/32 and udp.dstport == 443 and ipv6.hlim < 10 and ipv6.plen > 1000 and udp.srcport == 443`,
	`ip.src == 10.0.0.0/8 and icmp.type == 8 and ip.len > 1000 and ip.ttl < 10 and icmp.code == 0`,
	`tcp.srcport == 179 and ip.ttl == 255 and tcp.flags.reset and ip.src == 192.0.2.1 and ip.dst == 192.0.2.2`,
	`udp.srcport in {19 161 389} and udp.length > 400 and ip and not ip.flags.mf and ip.frag_offset == 0`,
	`udp.dstport == 123 and ip.len != 76 and ip.src != 10.0.0.0/8 and ip.ttl > 5 and udp.srcport == 123`,
	`tcp.dstport == 443 and tcp.hdr_len == 20 and tcp.flags.syn and ip.dsfield.dscp == 0 and ip.src != 10.0.0.0/8`,
	`ip.proto == 47 and ip.dst == 203.0.113.0/24 and ip.ttl < 32 and ip.len > 1400 and not ip.flags.df`,
}

// compileLoad measures the time from text to a program verified by the kernel.
func (x *experiment) compileLoad(ctx context.Context) error {
	x.say("ten rules of five terms: parse, compile and load %d times at each hook", x.loads)
	var all, headers []time.Duration
	for _, h := range fuzzHooks {
		var of []time.Duration
		for range x.loads/len(fuzzHooks) + 1 {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			d, err := loadOnce(h, tenRules)
			if err != nil {
				return fmt.Errorf("%s: %w", h, err)
			}
			plain, err := loadOnce(h, headerRules)
			if err != nil {
				return fmt.Errorf("%s: %w", h, err)
			}
			of, headers = append(of, d), append(headers, plain)
		}
		all = append(all, of...)
		p50, _, _ := lab.Percentiles(of)
		x.result.Set("compile_load_ms_"+h.String(), float64(p50.Microseconds())/1000)
	}
	p50, p99, _ := lab.Percentiles(all)
	plain, _, _ := lab.Percentiles(headers)
	x.result.Set("compile_load_ms_headers", float64(plain.Microseconds())/1000)
	x.result.Set("compile_load_ms_p50", float64(p50.Microseconds())/1000)
	x.result.Set("compile_load_ms_p99", float64(p99.Microseconds())/1000)
	return nil
}

func loadOnce(h compile.Hook, texts []string) (time.Duration, error) {
	begin := time.Now()
	rules := make([]compile.Rule, len(texts))
	for i, text := range texts {
		e, err := expr.Parse(text)
		if err != nil {
			return 0, err
		}
		rules[i] = compile.Rule{Name: fmt.Sprint("r", i), Match: e, Action: compile.Drop}
	}
	_, _, unload, err := load(rules, compile.Options{Hook: h})
	d := time.Since(begin)
	if err == nil {
		unload()
	}
	return d, err
}
