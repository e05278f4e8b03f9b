// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// BenchmarkChange measures a change of one rule, from the configuration to the new program at every
// attachment: read, plan, compile, load, verify, attach and pin.
func BenchmarkChange(b *testing.B) {
	nstest.NeedRoot(b)
	for _, h := range hooks {
		for _, n := range []int{1, 10, 1000} {
			b.Run(fmt.Sprintf("%s/%d rules", h, n), func(b *testing.B) {
				needHook(b, h)
				w := newWorld(b)
				f := w.filter(h)
				for i := range n {
					f.Rules = append(f.Rules, drops(10000+i))
				}
				w.apply(f)
				i := 0
				for b.Loop() {
					f.Rules[0] = drops(5000 + i%2)
					w.apply(f)
					i++
				}
			})
		}
	}
}

// BenchmarkState measures the reads of weir filter list and of a scrape.
func BenchmarkState(b *testing.B) {
	nstest.NeedRoot(b)
	for _, n := range []int{1, 1000} {
		b.Run(fmt.Sprintf("%d rules", n), func(b *testing.B) {
			needHook(b, HookTCX)
			w := newWorld(b)
			f := w.filter(HookTCX)
			for i := range n {
				f.Rules = append(f.Rules, drops(10000+i))
			}
			w.apply(f)
			for b.Loop() {
				w.state()
			}
		})
	}
}
