// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }
