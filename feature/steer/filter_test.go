// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestFilterLoads(t *testing.T) {
	nstest.NeedRoot(t)
	spec, err := loadTemplates()
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	c, err := kernel.Load(spec, []string{templatesProgTemplatesFilter}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(time.Since(start))
	info, _ := c.Programs[templatesProgTemplatesFilter].Info()
	n, _ := info.VerifiedInstructions()
	t.Log(n)
}
